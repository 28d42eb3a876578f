"""Predict for image files, or all images in folders, with a checkpoint: what the system's
predict_step returns.

python scripts/predict.py --ckpt_path logs/cifar10_cnn/version_0/checkpoints/best.ckpt cat.jpg
photos/
python scripts/predict.py --ckpt_path ... photos/ --top_k 3 --probabilities --output predictions.csv

A row for each file: the likeliest class and its probability, where the data has classes; the
numbers otherwise. Images of any size and mode are brought to the size and channels that the network
was trained with. Files that cannot be read are reported and left out; the exit status is then 1.
Hidden files in folders are left out.

In the CSV a name that a spreadsheet would take for a formula has a ' before it; in the table, and
for bytes that are no UTF-8, what cannot be printed is written as an escape such as \\n.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightbase.cli.script import ScriptParser, output_file, short_errors
from lightbase.compat import quiet_lightning
from lightbase.data.images import find_images, read_image
from lightbase.data.module import BaseDataModule, shape_of_images
from lightbase.errors import UserError
from lightbase.folder import write_whole
from lightbase.ranks import printable
from lightbase.resume.load import load_run
from lightbase.tools.tables import as_csv, as_table

BATCH_SIZE = 256


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_checkpoint_arguments()
    parser.add_argument("--output", type=output_file, help="write a CSV file instead of a table")
    parser.add_argument("--top_k", type=int, metavar="K", help="the K likeliest classes, not one")
    parser.add_argument("--probabilities", action="store_true", help="a column for each class")
    parser.add_argument(
        "images", type=Path, nargs="+", metavar="IMAGE", help="image files or folders of them"
    )
    with short_errors():
        known = parser.parse_args(args)
        quiet_lightning()
        run = load_run(known.ckpt_path, is_trusted=known.trust_checkpoint == "true")
        data = run.datamodule
        name = type(data).__name__
        shape = shape_of_images(data.empty_batch) if isinstance(data, BaseDataModule) else None
        if not isinstance(data, BaseDataModule) or shape is None:
            what = (
                f"{known.ckpt_path} was trained on {name}: how an image file becomes such "
                "an input is not known"
            )
            raise UserError(
                f"{what}\na BaseDataModule tells, if its load gives uint8 images and "
                "normalize scales them"
            )
        if shape[0] not in (1, 3):
            raise UserError(
                f"{known.ckpt_path} was trained on images {shape}: files have 1 or 3 channels"
            )
        if not data.classes and (known.top_k is not None or known.probabilities):
            raise UserError(f"--top_k and --probabilities are of classes, which {name} has not", 2)
        top_k = 1 if known.top_k is None else known.top_k
        if not 0 < top_k <= max(1, len(data.classes)):
            raise UserError(f"--top_k {top_k}: {name} has {len(data.classes)} classes", 2)
        if not (is_overridden("predict_step", run.model) or is_overridden("forward", run.model)):
            raise UserError(
                f"{type(run.model).__name__} has neither predict_step nor forward: it "
                "predicts nothing"
            )
        files, unreadable = find_images(known.images)
        rows: list[tuple[str, ...]] = []
        for batch_files, images in read_batches(files, shape, unreadable):
            outputs = predict(run.model, data, images)
            header, columns = describe(outputs, data.classes, top_k, known.probabilities)
            rows = rows or [("file", *header)]
            rows += [(str(file), *cells) for file, cells in zip(batch_files, columns, strict=True)]
        write(rows, known.output)
        for file, reason in unreadable:
            print(f"cannot read {printable(str(file))}: {reason}", file=sys.stderr)
        if unreadable:
            sys.exit(1)


def read_batches(
    files: list[Path], shape: tuple[int, int, int], unreadable: list[tuple[Path, str]]
) -> Iterator[tuple[list[Path], Tensor]]:
    """Batches of readable files with their images, uint8 (N, C, H, W); the others go to
    `unreadable`."""
    readable: list[Path] = []
    images: list[Tensor] = []
    for file in files:
        try:
            images.append(read_image(file, shape))
            readable.append(file)
        except UserError as error:
            unreadable.append((file, str(error)))
        if len(images) == BATCH_SIZE:
            yield readable, torch.stack(images)
            readable, images = [], []
    if images:
        yield readable, torch.stack(images)


@torch.inference_mode()
def predict(model: LightningModule, data: BaseDataModule, images: Tensor) -> Tensor:
    """What predict_step returns for images, uint8 (N, C, H, W): (N, ...)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = data.normalize(images.to(device))
    # Lightning's own predict_step hands its argument to forward
    batch = (inputs, None) if is_overridden("predict_step", model) else inputs
    outputs = model.eval().to(device).predict_step(batch, 0)
    if not isinstance(outputs, Tensor) or len(outputs) != len(images):
        raise UserError(
            f"predict_step of {type(model).__name__} has to return a tensor with a row for "
            "each image"
        )
    return outputs.cpu()


def describe(
    outputs: Tensor, classes: list[str], top_k: int, probabilities: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns' names, and a row for each image."""
    are_classes = len(classes) > 0 and outputs.dim() == 2 and outputs.shape[1] >= len(classes)
    if not are_classes and (top_k > 1 or probabilities):
        what = f"--top_k and --probabilities need (N, {len(classes)}) of predict_step"
        raise UserError(f"{what}, which returned {tuple(outputs.shape)}", 2)
    outputs = outputs.reshape(len(outputs), -1)
    if not are_classes:
        header = (
            ["prediction"]
            if outputs.shape[1] == 1
            else [f"prediction_{i}" for i in range(outputs.shape[1])]
        )
        return tuple(header), [tuple(f"{value:.6g}" for value in row) for row in outputs.tolist()]
    names = [*classes, *map(str, range(len(classes), outputs.shape[1]))]
    header = [
        f"{what}{'' if k == 1 else f'_{k}'}"
        for k in range(1, top_k + 1)
        for what in ("class", "probability")
    ]
    header += [f"probability_{name}" for name in names] if probabilities else []
    rows = []
    for values, order in zip(
        outputs.tolist(), outputs.argsort(1, descending=True)[:, :top_k].tolist(), strict=True
    ):
        cells = [cell for i in order for cell in (names[i], f"{values[i]:.4f}")]
        rows.append((*cells, *(f"{value:.4f}" for value in values if probabilities)))
    return tuple(header), rows


def write(rows: list[tuple[str, ...]], output: Path | None) -> None:
    """rows: the columns' names first; empty where no image could be read."""
    if output is not None:
        write_whole(output, as_csv(rows))
        print(f"{max(0, len(rows) - 1)} predictions in {output}")
    elif rows:
        print("\n".join(as_table(rows)))
