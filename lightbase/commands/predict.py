"""Predict with a checkpoint: what predict_step of its LightningModule returns."""

import io
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningDataModule
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from lightbase.commands import arguments
from lightbase.commands.runs import as_csv, as_table
from lightbase.commands.script import short_errors
from lightbase.core.batches import as_it_is, inputs_of, targets_of
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import (
    ONE_DEVICE,
    cpu_threads,
    num_devices,
    short_device_errors,
)
from lightbase.core.errors import UserError, printable
from lightbase.core.folder import write_whole
from lightbase.core.resume import load_run
from lightbase.core.training_cli import TrainingCLI
from lightbase.extras.figures import class_names, labels, predicted_masks, probabilities
from lightbase.extras.image_folder import find_images

BATCH_SIZE = 256  # of files
MAX_COLUMNS = 100  # of numbers in a table
# (256, 3): colours of the classes in masks, as of torchvision's draw_segmentation_masks
PALETTE = (
    torch.arange(256)[:, None] * torch.tensor([2**25 - 1, 2**15 - 1, 2**21 - 1]) % 255
)
NO_ROWS = (
    "predict_step has to return tensors, in a dict or tuple, with a row for each input"
)
STAGES = {"train": "fit", "val": "validate", "test": "test"}
Cells = list[tuple[str, str]]  # columns and texts
Rows = dict[
    str, list[Tensor]
]  # of each sample, by the name in what predict_step returns


def main(args: Sequence[str] | None = None) -> None:
    with short_errors():
        options, flags = arguments.predict().read(args)
        quiet_lightning()
        run = load_run(options.ckpt_path, flags, options.trust)
        data = run.datamodule
        of_plain_module = "multiclass" if getattr(data, "classes", None) else None
        options.task = getattr(run.model, "task", of_plain_module)
        is_npz = options.output is not None and options.output.suffix == ".npz"
        has_masks = options.task == "segmentation" and not is_npz
        check_output(options.output, has_masks)
        unreadable: list[tuple[Path, str]] = []
        if options.files:
            names: list[str] = []
            batches: Any = FileBatches(data, options.files, names, unreadable)
        else:
            batches = loader_of_split(data, options.split)
            names = [str(i) for i in range(len(batches.dataset))]
        collector = Collector(has_masks)
        predict(run, batches, collector)
        outputs, true = collector.outputs, collector.true
        if (
            run.config.trainer.fast_dev_run
            or run.config.trainer.limit_predict_batches is not None
        ):
            names = names[: len(next(iter(outputs.values()), []))]
        if any(len(rows) != len(names) for rows in outputs.values()):
            raise UserError(NO_ROWS)
        if is_npz:
            write_arrays(options.output, names, outputs)
        elif has_masks:
            write_masks(options.output, names, outputs)
        else:
            write_table(options, data, names, outputs, true)
        if options.output is not None:
            print(f"{len(names)} predictions in {options.output}")
        for file, reason in unreadable:
            print(
                f"error: cannot read {printable(str(file))}: {reason}", file=sys.stderr
            )
        if unreadable:
            sys.exit(1)


def check_output(output: Path | None, is_folder: bool) -> None:
    """Raises UserError if it cannot be written."""
    if is_folder and (output is None or output.suffix or output.is_file()):
        raise UserError(
            "masks are no table: give --output FOLDER or FILE.npz", status=2
        )
    if output and not is_folder and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(
            f"--output {output} is a folder, or in none that is there", status=2
        )


def loader_of_split(data: LightningDataModule, split: str) -> Any:
    """The samples of a split, in the order of the data set."""
    data.prepare_data()
    data.setup(STAGES[split])
    if not isinstance(data, BaseDataModule):
        return getattr(data, f"{split}_dataloader")()
    if split not in data.splits:
        raise UserError(
            f"--split {split}: {type(data).__name__} has no such set", status=2
        )
    return DataLoader(  # by names: Lightning may make it again from them
        data.splits[split],
        batch_size=data.eval_batch_size or data.batch_size,
        collate_fn=as_it_is,
        num_workers=data.num_workers,
    )


class FileBatches:
    """Batches of what the files hold. Iterating adds to `names` and `unreadable`."""

    def __init__(
        self,
        data: Any,
        paths: list[Path],
        names: list[str],
        unreadable: list[tuple[Path, str]],
    ) -> None:
        if not isinstance(data, BaseDataModule):
            what = f"files need a BaseDataModule, which {type(data).__name__} is not"
            raise UserError(what, "without files the test set is predicted", 2)
        self.data, self.names, self.unreadable = data, names, unreadable
        self.files, missing = find_images(paths)
        unreadable += missing

    def __iter__(self) -> Iterator[Any]:
        samples = self.samples()
        while waiting := list(islice(samples, BATCH_SIZE)):
            self.names += [name for name, _ in waiting]
            batch = self.data.collate([sample for _, sample in waiting])
            yield (batch, None) if isinstance(batch, Tensor) else batch

    def samples(self) -> Iterator[tuple[str, Any]]:
        for file in self.files:
            try:
                yield from self.data.read_inputs(file)
            except UserError as error:
                self.unreadable.append((file, str(error)))


class Collector(Callback):
    """Keeps what predict_step returns for each sample and, as far as they are tensors,
    the targets, on the CPU.

    has_masks: Keep the class of each pixel, not its probabilities.
    """

    def __init__(self, has_masks: bool) -> None:
        self.has_masks = has_masks
        self.outputs: Rows = defaultdict(list)
        self.true: list[Tensor] = []

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        for name, rows in rows_by_name(outputs).items():
            if self.has_masks and isinstance(rows, Tensor) and rows.dim() == 4:
                rows = predicted_masks(rows)
            self.outputs[name] += move_data_to_device(
                rows, "cpu"
            )  # one copy for a batch
        targets = targets_of(batch)
        self.true += targets.cpu() if isinstance(targets, Tensor) else []


def predict(run: TrainingCLI, batches: Any, collector: Collector) -> None:
    """Predict the batches with the precision of the run, by Lightning's loop, as
    evaluate.py tests."""
    model, data = run.model, run.datamodule
    if not is_overridden(
        "predict_step", model
    ):  # Lightning's own hands the batch to forward
        model.predict_step = lambda batch, *_: model(inputs_of(batch))  # type: ignore[method-assign]
    data.predict_dataloader = lambda: batches  # type: ignore[method-assign]
    # A split is set up by now, and files need no data set.
    data.prepare_data = lambda: None  # type: ignore[method-assign]
    data.setup = lambda stage: None  # type: ignore[method-assign]
    trainer_flags = run.config.trainer
    if (
        num_devices(trainer_flags.devices) != 1
        or trainer_flags.strategy not in ONE_DEVICE
    ):
        what = f"trainer.devices {trainer_flags.devices}, strategy {trainer_flags.strategy}"
        raise UserError(
            f"{what}: predictions are made on one device", "leave the strategy out", 2
        )
    options: Any = {
        "logger": False,
        "enable_checkpointing": False,
        "callbacks": [collector],
    }
    trainer = run.make_trainer(**options)
    with short_device_errors(), cpu_threads(run.config.num_threads):
        trainer.predict(model, datamodule=data, return_predictions=False)


def rows_by_name(outputs: Any) -> dict[str, Any]:
    """What predict_step returns for a batch: the tensors of a dict or tuple by their
    names. A list of dicts has a dict for each sample. Raises UserError for anything
    else."""
    if isinstance(outputs, list) and outputs and isinstance(outputs[0], dict):
        return {name: [sample[name] for sample in outputs] for name in outputs[0]}
    if isinstance(outputs, tuple | list):
        outputs = {str(i): rows for i, rows in enumerate(outputs)}
    rows = outputs if isinstance(outputs, dict) else {"prediction": outputs}
    if not all(isinstance(row, Tensor) and row.dim() for row in rows.values()):
        raise UserError(NO_ROWS)
    return rows


def write_arrays(path: Path, names: list[str], outputs: Rows) -> None:
    """An array (N, ...) for each name; NAME.i for sample i if their shapes differ."""
    content = {"names": np.array(names)}
    for name, rows in outputs.items():
        rows = [row.float() if row.dtype == torch.bfloat16 else row for row in rows]
        if len({row.shape for row in rows}) == 1:
            content[name] = torch.stack(rows).numpy()
        else:
            content |= {f"{name}.{i}": row.numpy() for i, row in enumerate(rows)}
    buffer = io.BytesIO()
    np.savez(buffer, **content)  # type: ignore[arg-type]
    write_whole(path, buffer.getbuffer())


def write_masks(folder: Path, names: list[str], outputs: Rows) -> None:
    """Palette images of the class indices, with the names of the inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [(folder / f"{Path(name).stem}.png").resolve() for name in names]
    if len({*paths, *(Path(name).resolve() for name in names)}) < 2 * len(names):
        what = "two inputs have one name, or an input is in this folder"
        raise UserError(
            f"--output {folder}: {what}", "give another folder, or FILE.npz", 2
        )
    for path, mask in zip(paths, single(outputs), strict=True):
        if mask.dim() != 2 or (mask.byte() != mask).any():
            what = f"predict_step returns {mask.dtype} {tuple(mask.shape)} for a sample, no mask"
            raise UserError(
                f"{what} of 256 classes at most", "give --output FILE.npz", 2
            )
        image = Image.fromarray(mask.byte().numpy()).convert("P")
        image.putpalette(PALETTE.flatten().tolist())
        buffer = io.BytesIO()
        image.save(buffer, "png")
        write_whole(path, buffer.getbuffer())


def single(outputs: Rows) -> list[Tensor]:
    """The outputs, if predict_step returns one tensor. Raises UserError otherwise."""
    if outputs.keys() - {"prediction"}:
        what = f"predict_step returns {', '.join(outputs)}, which is no table"
        raise UserError(what, "--output FILE.npz writes any tensors", 2)
    return outputs.get("prediction", [])


def write_table(
    options: Any, data: Any, names: list[str], outputs: Rows, true: list[Tensor]
) -> None:
    """A CSV file, or a table on stdout."""
    rows = single(outputs)
    if (
        options.task == "multilabel" and rows
    ):  # all together say whether they are logits
        rows = list(probabilities(torch.stack(rows)))
    table: list[tuple[str, ...]] = []
    for i, (name, values) in enumerate(zip(names, rows, strict=True)):
        cells = [
            ("file" if options.files else "sample", name),
            *cells_of(values, data, options),
        ]
        if options.task == "multiclass" and true:
            cells.append(("true", class_names(data, int(true[i]) + 1)[int(true[i])]))
        if options.task == "regression" and true:
            cells += number_cells(true[i], "true")
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
    if options.task not in ("multiclass", "multilabel") or values.shape != (
        len(names),
    ):
        if options.top_k != 1 or options.probabilities:
            what = "--top_k and --probabilities need classes, and (N, classes) of predict_step"
            raise UserError(
                f"{what}, which returned {tuple(values.shape)} for a sample", status=2
            )
        is_text = options.task == "text" and not values.is_floating_point()
        return (
            [("text", data.to_text(values))]
            if is_text
            else number_cells(values, "prediction")
        )
    if options.task == "multilabel":
        cells = [("labels", labels(values > options.threshold, names))]
    else:
        cells = class_cells(values, names, options.top_k)
    if options.probabilities:
        cells += [
            (f"probability_{n}", f"{v:.4f}") for n, v in zip(names, values, strict=True)
        ]
    return cells


def class_cells(values: Tensor, names: list[str], top_k: int) -> Cells:
    if not 0 < top_k <= len(names):
        raise UserError(f"--top_k {top_k}: there are {len(names)} classes", status=2)
    cells = []
    for k, i in enumerate(values.argsort(descending=True)[:top_k].tolist(), start=1):
        end = f"_{k}" if k > 1 else ""
        cells += [(f"class{end}", names[i]), (f"probability{end}", f"{values[i]:.4f}")]
    return cells


def number_cells(values: Tensor, name: str) -> Cells:
    if values.numel() > MAX_COLUMNS:
        what = f"predict_step returns {tuple(values.shape)} for a sample, too much for a table"
        raise UserError(what, "--output FILE.npz writes it", 2)
    numbers = [f"{value:.6g}" for value in values.flatten().tolist()]
    if len(numbers) == 1:
        return [(name, numbers[0])]
    return [(f"{name}_{i}", number) for i, number in enumerate(numbers)]
