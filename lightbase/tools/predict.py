r"""Predict for image files with a checkpoint: what predict_step of its LightningModule returns.

python scripts/predict.py --ckpt_path logs/cifar10_cnn/version_0/checkpoints/best.ckpt cat.jpg
python scripts/predict.py --ckpt_path ... photos/ --top_k 3 --probabilities --output predictions.csv

Each file gets a row: the likeliest class and its probability if the data has classes, else the
numbers. Images of any size and mode are brought to the size and channels of the training images.
Hidden files in folders are skipped. Files that cannot be read are reported; the exit status is 1.

In the CSV a name that a spreadsheet would take for a formula begins with '. Bytes that are not
UTF-8, and in the table characters that cannot be printed, are written as an escape such as \n.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightbase.cli.script import ScriptParser, output_file, short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.data.batches import for_network
from lightbase.data.images import find_images, read_image
from lightbase.data.module import BaseDataModule, shape_of_images
from lightbase.errors import UserError
from lightbase.folder import write_whole
from lightbase.ranks import printable
from lightbase.resume.load import load_run
from lightbase.tools.runs import as_csv, as_table

BATCH_SIZE = 256
Row = tuple[str, ...]


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_checkpoint_arguments()
    parser.add_argument("--output", type=output_file, help="write a CSV file instead of a table")
    parser.add_argument("--top_k", type=int, metavar="K", default=1, help="the K likeliest classes")
    parser.add_argument("--probabilities", action="store_true", help="a column for each class")
    parser.add_argument(
        "images", type=Path, nargs="+", metavar="IMAGE", help="image files or folders of them"
    )
    with short_errors():
        options = parser.parse_args(args)
        quiet_lightning()
        run = load_run(options.ckpt_path, is_trusted=options.trust_checkpoint == "true")
        data, shape = images_of(run, options.ckpt_path)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        predictor = Predictor(run.model, data.normalize).to(device)
        files, unreadable = find_images(options.images)
        rows: list[Row] = []
        for start in range(0, len(files), BATCH_SIZE):
            images = read_images(files[start : start + BATCH_SIZE], shape, unreadable)
            if not images:
                continue
            outputs = predictor.predict(torch.stack([*images.values()]).to(device)).cpu()
            header, cells = columns(outputs, data, options.top_k, options.probabilities)
            rows = rows or [("file", *header)]
            rows += [(str(file), *row) for file, row in zip(images, cells, strict=True)]
        if options.output is not None:
            write_whole(options.output, as_csv(rows))
            print(f"{max(0, len(rows) - 1)} predictions in {options.output}")
        elif rows:
            print("\n".join(as_table(rows)))
        for file, reason in unreadable:
            print(f"error: cannot read {printable(str(file))}: {reason}", file=sys.stderr)
        if unreadable:
            sys.exit(1)


class Predictor(nn.Module):
    """From samples (N, ...) as the data module loads them to what predict_step returns."""

    def __init__(self, model: LightningModule, normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model.eval()
        self.normalize = normalize
        # Lightning's own predict_step hands its argument to forward
        self.takes_pairs = is_overridden("predict_step", model)

    def forward(self, samples: Tensor) -> Tensor:
        inputs = for_network(self.normalize(samples), self.model)
        batch = (inputs, None) if self.takes_pairs else inputs
        return self.model.predict_step(batch, 0)  # type: ignore[no-any-return]

    @torch.no_grad()
    def predict(self, samples: Tensor) -> Tensor:
        """Outputs (N, ...) for samples (N, ...). Raises UserError if they are anything else."""
        outputs = self(samples)
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != samples.shape[:1]:
            what = f"predict_step of {type(self.model).__name__} has to return a tensor"
            raise UserError(f"{what} with a row for each input")
        return outputs


def images_of(run: TrainingCLI, checkpoint: Path) -> tuple[BaseDataModule, tuple[int, int, int]]:
    """The data module and the shape of its images. Raises UserError for other samples."""
    data = run.datamodule
    shape = shape_of_images(data.empty_batch) if isinstance(data, BaseDataModule) else None
    if not isinstance(data, BaseDataModule) or shape is None or shape[0] not in (1, 3):
        raise UserError(
            f"{checkpoint} was trained on {type(data).__name__}: how an image file becomes such an "
            "input is not known\na BaseDataModule tells, if its load gives uint8 images of 1 or 3 "
            "channels, and normalize scales them"
        )
    return data, shape


def read_images(
    files: list[Path], shape: tuple[int, int, int], unreadable: list[tuple[Path, str]]
) -> dict[Path, Tensor]:
    """The images, uint8 (C, H, W), by file. Adds files that cannot be read to `unreadable`."""
    images: dict[Path, Tensor] = {}
    for file in files:
        try:
            images[file] = read_image(file, shape)
        except UserError as error:
            unreadable.append((file, str(error)))
    return images


def columns(
    outputs: Tensor, data: BaseDataModule, top_k: int, probabilities: bool
) -> tuple[Row, list[Row]]:
    """The names of the columns, and a row for each of the outputs (N, ...)."""
    num_classes = len(data.classes)
    if num_classes and outputs.dim() == 2 and outputs.shape[1] >= num_classes:
        if not 0 < top_k <= num_classes:
            raise UserError(f"--top_k {top_k}: {type(data).__name__} has {num_classes} classes", 2)
        return class_columns(outputs, data.classes, top_k, probabilities)
    if top_k != 1 or probabilities:
        what = "--top_k and --probabilities need classes, and (N, classes) of predict_step"
        raise UserError(f"{what}, which returned {tuple(outputs.shape)}", 2)
    numbers = outputs.flatten(1) if outputs.dim() > 1 else outputs[:, None]
    header = [f"prediction_{i}" for i in range(numbers.shape[1])]
    if len(header) == 1:
        header = ["prediction"]
    return tuple(header), [tuple(f"{value:.6g}" for value in row) for row in numbers.tolist()]


def class_columns(
    outputs: Tensor, classes: list[str], top_k: int, probabilities: bool
) -> tuple[Row, list[Row]]:
    """outputs: (N, number of classes or more)."""
    names = [*classes, *map(str, range(len(classes), outputs.shape[1]))]
    header = ["class", "probability"]
    for k in range(2, top_k + 1):
        header += [f"class_{k}", f"probability_{k}"]
    if probabilities:
        header += [f"probability_{name}" for name in names]
    rows = []
    for values in outputs:
        row = []
        for i in values.argsort(descending=True)[:top_k].tolist():
            row += [names[i], f"{values[i]:.4f}"]
        if probabilities:
            row += [f"{value:.4f}" for value in values]
        rows.append(tuple(row))
    return tuple(header), rows
