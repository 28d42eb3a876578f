r"""Predict with a checkpoint: what predict_step of its LightningModule returns.

python scripts/predict.py --ckpt_path logs/cifar10_cnn/version_0/checkpoints/best.ckpt cat.jpg
python scripts/predict.py --ckpt_path ... photos/ --top_k 3 --probabilities --output predictions.csv
python scripts/predict.py --ckpt_path ... --split val --output predictions.npz

Without files it predicts the samples of a split, in the order of the data set, with the true values
beside. Files are what `read_inputs` of the data module reads: images of any size and mode, or the
rows of a CSV file. Hidden files in folders are skipped. Files that cannot be read are reported; the
exit status is 1.

The `task` of the module says what is written. multiclass: the likeliest class and its probability.
multilabel: the labels with a probability over --threshold. segmentation: a PNG for each mask, into
the folder --output. text: what `to_text` of the data module makes of it. Otherwise the numbers.
--output FILE.npz writes all tensors of predict_step as they are.

In the CSV a name that a spreadsheet would take for a formula begins with '. Bytes that are not
UTF-8, and in the table characters that cannot be printed, are written as an escape such as \n.
"""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightbase.cli.script import ScriptParser, short_errors
from lightbase.compat import quiet_lightning
from lightbase.data.batches import as_it_is, for_network
from lightbase.data.images import find_images
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.folder import write_whole
from lightbase.module import BaseModule
from lightbase.ranks import printable
from lightbase.resume.load import load_run
from lightbase.tools.runs import as_csv, as_table
from lightbase.watch.figures import PALETTE, class_names, predicted_masks, probabilities

BATCH_SIZE = 256  # of files
MAX_COLUMNS = 100  # of numbers in a table
STAGES = {"train": "fit", "val": "validate", "test": "test"}
Cells = list[tuple[str, str]]  # columns and texts
Named = tuple[list[str], Any]  # the names of samples, and a batch of them


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_checkpoint_arguments()
    parser.add_argument("--split", choices=STAGES, default="test", help="the set without files")
    parser.add_argument("--output", type=Path, help="FILE.csv, FILE.npz, or a folder for masks")
    parser.add_argument("--top_k", type=int, metavar="K", default=1, help="the K likeliest classes")
    parser.add_argument("--probabilities", action="store_true", help="a column for each class")
    parser.add_argument("--threshold", type=float, default=0.5, help="of a label's probability")
    parser.add_argument("files", type=Path, nargs="*", help="files, or folders of images")
    with short_errors():
        options = parser.parse_args(args)
        quiet_lightning()
        run = load_run(options.ckpt_path, is_trusted=options.trust_checkpoint == "true")
        data, options.task = run.datamodule, task_of(run.model, run.datamodule)
        is_npz = options.output is not None and options.output.suffix == ".npz"
        has_masks = options.task == "segmentation" and not is_npz
        check_output(options.output, has_masks)
        unreadable: list[tuple[Path, str]] = []
        if options.files:
            batches = batches_of_files(data, options.files, unreadable)
        else:
            batches = batches_of_split(data, options.split)
        predictions = predict(run.model, data, batches, has_masks)
        if is_npz:
            write_arrays(options.output, predictions)
        elif has_masks:
            write_masks(options.output, predictions)
        else:
            write_table(options, predictions, data)
        if options.output is not None:
            print(f"{len(predictions.names)} predictions in {options.output}")
        for file, reason in unreadable:
            print(f"error: cannot read {printable(str(file))}: {reason}", file=sys.stderr)
        if unreadable:
            sys.exit(1)


@dataclass
class Predictions:
    """names: Of the samples. true: Their targets, as far as they are tensors. outputs: Of each
    sample, by the path of the tensor in what predict_step returns; "prediction" for one tensor."""

    names: list[str] = field(default_factory=list)
    true: list[Tensor] = field(default_factory=list)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def single(self) -> list[Tensor]:
        """The outputs, if predict_step returns one tensor. Raises UserError otherwise."""
        if self.outputs.keys() - {"prediction"}:
            what = f"predict_step returns {', '.join(self.outputs)}, which is no table"
            raise UserError(f"{what}\n--output FILE.npz writes any tensors", 2)
        return self.outputs.get("prediction", [])


@torch.no_grad()
def predict(
    model: LightningModule, data: LightningDataModule, batches: Iterator[Named], has_masks: bool
) -> Predictions:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    predictor = Predictor(model, nn.Identity()).to(device)
    predictions = Predictions()
    for names, batch in batches:
        if isinstance(data, BaseDataModule):
            batch = data.transform_batch(move_data_to_device(batch, device), training=False)
        else:
            batch = data.transfer_batch_to_device(batch, device, 0)
            batch = data.on_after_batch_transfer(batch, 0)
        outputs = predictor.step(batch)
        if has_masks and isinstance(outputs, Tensor) and outputs.dim() == 4:
            outputs = predicted_masks(outputs)
        for key, rows in rows_by_path(outputs, len(names)):
            predictions.outputs.setdefault(key, []).extend(rows.cpu())
        predictions.names += names
        if isinstance(batch, tuple | list) and isinstance(batch[-1], Tensor) and len(batch) == 2:
            predictions.true.extend(batch[1].cpu())
    return predictions


class Predictor(nn.Module):
    """From samples (N, ...) as the data module loads them to what predict_step returns."""

    def __init__(self, model: LightningModule, normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model.eval()
        self.normalize = normalize
        # Lightning's own predict_step hands its argument to forward
        self.takes_batches = is_overridden("predict_step", model)

    def forward(self, samples: Tensor) -> Any:
        return self.step((self.normalize(samples), None))

    def step(self, batch: Any) -> Any:
        """batch: on the device of the model, after the transforms."""
        if isinstance(batch, tuple | list):
            inputs = batch[0]
            if isinstance(inputs, Tensor):
                inputs = for_network(inputs, self.model)
            batch = (inputs, *batch[1:]) if self.takes_batches else inputs
        return self.model.predict_step(batch, 0)

    @torch.no_grad()
    def predict(self, samples: Tensor) -> Tensor:
        """Outputs (N, ...) for samples (N, ...). Raises UserError if they are anything else."""
        outputs = self(samples)
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != samples.shape[:1]:
            what = f"predict_step of {type(self.model).__name__} has to return a tensor"
            raise UserError(f"{what} with a row for each input")
        return outputs


def task_of(model: LightningModule, data: Any) -> str | None:
    if isinstance(model, BaseModule):
        return model.task
    return "multiclass" if isinstance(data, BaseDataModule) and data.classes else None


def check_output(output: Path | None, is_folder: bool) -> None:
    """Raises UserError if it cannot be written."""
    if is_folder and (output is None or output.suffix or output.is_file()):
        raise UserError("masks are no table: give --output FOLDER or FILE.npz", 2)
    if output and not is_folder and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"--output {output} is a folder, or in none that is there", 2)


def batches_of_split(data: LightningDataModule, split: str) -> Iterator[Named]:
    """The samples of a split, in the order of the data set. Their names are numbers."""
    data.prepare_data()
    data.setup(STAGES[split])
    if not isinstance(data, BaseDataModule):
        loaders = {"train": data.train_dataloader, "val": data.val_dataloader}
        loader: Any = loaders.get(split, data.test_dataloader)()
    elif split in data.splits:
        size, num_workers = data.eval_batch_size or data.batch_size, data.num_workers
        loader = DataLoader(data.splits[split], size, collate_fn=as_it_is, num_workers=num_workers)
    else:
        raise UserError(f"--split {split}: {type(data).__name__} has no such set", 2)
    start = 0
    for batch in loader:
        num = len(next(iter(arrays(batch).values())))
        if isinstance(data, BaseDataModule):  # also for images of different sizes
            num = min(size, len(loader.dataset) - start)
        yield [str(i) for i in range(start, start + num)], batch
        start += num


def batches_of_files(
    data: Any, paths: list[Path], unreadable: list[tuple[Path, str]]
) -> Iterator[Named]:
    """What the files hold. Files that cannot be read are added to `unreadable`."""
    if not isinstance(data, BaseDataModule):
        what = f"files need a BaseDataModule, which {type(data).__name__} is not"
        raise UserError(f"{what}\nwithout files the test set is predicted", 2)
    files, missing = find_images(paths)
    unreadable += missing
    waiting: list[tuple[str, Any]] = []
    for i, file in enumerate(files):
        try:
            waiting += list(data.read_inputs(file))
        except UserError as error:
            unreadable.append((file, str(error)))
        while len(waiting) >= BATCH_SIZE or (waiting and i == len(files) - 1):
            names, samples = zip(*waiting[:BATCH_SIZE], strict=True)
            batch = data.collate(list(samples))
            yield list(names), (batch, None) if isinstance(batch, Tensor) else batch
            waiting = waiting[BATCH_SIZE:]


def rows_by_path(outputs: Any, num: int) -> list[tuple[str, Tensor]]:
    """The tensors in a batch's outputs, with a row for each of `num` samples. Raises UserError for
    anything else. A list of dicts has a dict for each sample."""
    if isinstance(outputs, list) and all(isinstance(sample, dict) for sample in outputs):
        pairs = [(key, x[None]) for sample in outputs for key, x in arrays(sample).items()]
        has_rows = len(outputs) == num
    else:
        pairs = list(arrays(outputs).items())
        has_rows = all(tensor.shape[:1] == (num,) for _, tensor in pairs)
    if not pairs or not has_rows:
        what = "predict_step has to return tensors with a row for each input"
        raise UserError(
            f"{what}\nthey may be in dicts and tuples, or in a list with a dict for each"
        )
    return pairs


def arrays(values: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors in nested dicts, tuples and lists, by path, such as "boxes.0"."""
    if isinstance(values, Tensor):
        return {path or "prediction": values}
    tensors: dict[str, Tensor] = {}
    if isinstance(values, dict | tuple | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for name, inner in items:
            tensors |= arrays(inner, f"{path}.{name}".lstrip("."))
    return tensors


def write_arrays(path: Path, predictions: Predictions) -> None:
    """An array (N, ...) for each path; PATH.i for sample i if their shapes differ."""
    content = {"names": np.array(predictions.names)}
    for key, rows in predictions.outputs.items():
        rows = [row.float() if row.dtype == torch.bfloat16 else row for row in rows]
        if len({row.shape for row in rows}) == 1:
            content[key] = torch.stack(rows).numpy()
        else:
            content |= {f"{key}.{i}": row.numpy() for i, row in enumerate(rows)}
    buffer = io.BytesIO()
    np.savez(buffer, **content)  # type: ignore[arg-type]
    write_whole(path, buffer.getvalue())


def write_masks(folder: Path, predictions: Predictions) -> None:
    """Palette images of the class indices, with the names of the inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{Path(name).stem}.png" for name in predictions.names]
    if len({*paths}) < len(paths) or {path.resolve() for path in paths} & {
        Path(name).resolve() for name in predictions.names
    }:
        what = "two inputs have one name, or an input lies there"
        raise UserError(f"--output {folder}: {what}\ngive another folder, or FILE.npz", 2)
    for path, mask in zip(paths, predictions.single, strict=True):
        if mask.dim() != 2 or mask.is_floating_point() or not 0 <= mask.min() <= mask.max() < 256:
            what = f"predict_step returns {mask.dtype} {tuple(mask.shape)} for a sample, no mask"
            raise UserError(f"{what} of 256 classes at most\ngive --output FILE.npz", 2)
        image = Image.fromarray(mask.numpy().astype(np.uint8)).convert("P")
        image.putpalette(PALETTE.flatten().tolist())
        image.save(path)


def write_table(options: Any, predictions: Predictions, data: Any) -> None:
    """A CSV file, or a table on stdout."""
    table: list[tuple[str, ...]] = []
    has_true = len(predictions.true) == len(predictions.names)
    true = predictions.true if has_true else [None] * len(predictions.names)
    outputs = predictions.single
    if options.task == "multilabel" and outputs:  # all together say whether they are logits
        outputs = list(probabilities(torch.stack(outputs)))
    for name, values, target in zip(predictions.names, outputs, true, strict=True):
        cells = [("file" if options.files else "sample", name)]
        cells += cells_of(values, data, options)
        if target is not None:
            cells += true_cells(target, data, options.task)
        header, row = zip(*cells, strict=True)
        table = table or [header]
        table.append(row)
    if options.output is not None:
        write_whole(options.output, as_csv(table))
    elif table:
        print("\n".join(as_table(table)))


def cells_of(values: Tensor, data: Any, options: Any) -> Cells:
    """The columns of a prediction, and their texts."""
    names = class_names(data, values.numel())
    is_vector = values.dim() == 1 and values.numel() == len(names)
    if is_vector and options.task == "multiclass":
        return class_cells(values, names, data, options)
    if is_vector and options.task == "multilabel":
        cells = [("labels", labels(values > options.threshold, names))]
        for name, value in zip(names, values.tolist(), strict=True):
            cells += [(f"probability_{name}", f"{value:.4f}")] * options.probabilities
        return cells
    if options.top_k != 1 or options.probabilities:
        what = "--top_k and --probabilities need classes, and (N, classes) of predict_step"
        raise UserError(f"{what}, which returned {tuple(values.shape)} for a sample", 2)
    if options.task == "text" and not values.is_floating_point():
        return [("text", data.to_text(values))]
    return number_cells(values, "prediction")


def class_cells(values: Tensor, names: list[str], data: Any, options: Any) -> Cells:
    if not 0 < options.top_k <= len(names):
        what = f"--top_k {options.top_k}: {type(data).__name__} has {len(names)} classes"
        raise UserError(what, 2)
    cells = []
    for k, i in enumerate(values.argsort(descending=True)[: options.top_k].tolist(), start=1):
        end = f"_{k}" if k > 1 else ""
        cells += [(f"class{end}", names[i]), (f"probability{end}", f"{values[i]:.4f}")]
    if options.probabilities:
        cells += [(f"probability_{n}", f"{v:.4f}") for n, v in zip(names, values, strict=True)]
    return cells


def true_cells(target: Tensor, data: Any, task: str | None) -> Cells:
    if task == "multiclass" and target.dim() == 0:
        return [("true", class_names(data, int(target) + 1)[int(target)])]
    if task == "multilabel":
        return [("true", labels(target > 0.5, class_names(data, len(target))))]
    if task == "text":
        return [("true", data.to_text(target[target >= 0]))]  # others are ignored by the loss
    return number_cells(target, "true")


def labels(is_set: Tensor, names: list[str]) -> str:
    return ", ".join(names[i] for i in is_set.nonzero()[:, 0])


def number_cells(values: Tensor, name: str) -> Cells:
    if values.numel() > MAX_COLUMNS:
        what = f"predict_step returns {tuple(values.shape)} for a sample, too much for a table"
        raise UserError(f"{what}\n--output FILE.npz writes it", 2)
    numbers = [f"{value:.6g}" for value in values.flatten().tolist()]
    if len(numbers) == 1:
        return [(name, numbers[0])]
    return [(f"{name}_{i}", number) for i, number in enumerate(numbers)]
