"""Predict with a checkpoint: what predict_step of its LightningModule returns."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightbase.cli import arguments
from lightbase.cli.script import short_errors
from lightbase.compat import quiet_lightning
from lightbase.data.batches import as_it_is, for_network, targets_of
from lightbase.data.images import find_images
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError, printable
from lightbase.folder import write_whole
from lightbase.resume.load import load_run
from lightbase.tools.runs import as_csv, as_table
from lightbase.watch.figures import class_names, labels, predicted_masks, probabilities

BATCH_SIZE = 256  # of files
MAX_COLUMNS = 100  # of numbers in a table
# (256, 3): colours of the classes in masks, as of torchvision's draw_segmentation_masks
PALETTE = torch.arange(256)[:, None] * torch.tensor([2**25 - 1, 2**15 - 1, 2**21 - 1]) % 255
NO_ROWS = "predict_step has to return tensors, in a dict or tuple, with a row for each input"
STAGES = {"train": "fit", "val": "validate", "test": "test"}
Cells = list[tuple[str, str]]  # columns and texts
Rows = dict[str, list[Tensor]]  # of each sample, by the name in what predict_step returns


def main(args: Sequence[str] | None = None) -> None:
    with short_errors():
        options, _ = arguments.predict().read(args)
        quiet_lightning()
        run = load_run(options.ckpt_path, is_trusted=options.trust_checkpoint == "true")
        data = run.datamodule
        of_plain_module = "multiclass" if getattr(data, "classes", None) else None
        options.task = getattr(run.model, "task", of_plain_module)
        is_npz = options.output is not None and options.output.suffix == ".npz"
        has_masks = options.task == "segmentation" and not is_npz
        check_output(options.output, has_masks)
        unreadable: list[tuple[Path, str]] = []
        if options.files:
            names: list[str] = []
            batches: Any = batches_of_files(data, options.files, names, unreadable)
        else:
            batches = loader_of_split(data, options.split)
            names = [str(i) for i in range(len(batches.dataset))]
        outputs, true = predict(run.model, data, batches, has_masks)
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
            print(f"error: cannot read {printable(str(file))}: {reason}", file=sys.stderr)
        if unreadable:
            sys.exit(1)


def check_output(output: Path | None, is_folder: bool) -> None:
    """Raises UserError if it cannot be written."""
    if is_folder and (output is None or output.suffix or output.is_file()):
        raise UserError("masks are no table: give --output FOLDER or FILE.npz", 2)
    if output and not is_folder and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"--output {output} is a folder, or in none that is there", 2)


def loader_of_split(data: LightningDataModule, split: str) -> Any:
    """The samples of a split, in the order of the data set."""
    data.prepare_data()
    data.setup(STAGES[split])
    if not isinstance(data, BaseDataModule):
        return getattr(data, f"{split}_dataloader")()
    if split not in data.splits:
        raise UserError(f"--split {split}: {type(data).__name__} has no such set", 2)
    size, num_workers = data.eval_batch_size or data.batch_size, data.num_workers
    return DataLoader(data.splits[split], size, collate_fn=as_it_is, num_workers=num_workers)


def batches_of_files(
    data: Any, paths: list[Path], names: list[str], unreadable: list[tuple[Path, str]]
) -> Iterator[Any]:
    """What the files hold. Adds to `names` and `unreadable`."""
    if not isinstance(data, BaseDataModule):
        what = f"files need a BaseDataModule, which {type(data).__name__} is not"
        raise UserError(f"{what}\nwithout files the test set is predicted", 2)
    files, missing = find_images(paths)
    unreadable += missing

    def inputs() -> Iterator[tuple[str, Any]]:
        for file in files:
            try:
                yield from data.read_inputs(file)
            except UserError as error:
                unreadable.append((file, str(error)))

    named = inputs()
    while waiting := list(islice(named, BATCH_SIZE)):
        names += [name for name, _ in waiting]
        batch = data.collate([sample for _, sample in waiting])
        yield (batch, None) if isinstance(batch, Tensor) else batch


@torch.no_grad()
def predict(
    model: LightningModule, data: LightningDataModule, batches: Iterable[Any], has_masks: bool
) -> tuple[Rows, list[Tensor]]:
    """The outputs and, as far as they are tensors, the targets of all samples."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    predictor = Predictor(model, nn.Identity()).to(device)
    outputs: Rows = defaultdict(list)
    true: list[Tensor] = []
    # on stderr, in a terminal, if it takes more than a second
    for batch in Tqdm(batches, "Predicting", disable=None, delay=1, leave=False):
        batch = data.transfer_batch_to_device(batch, device, 0)
        if isinstance(data, BaseDataModule):
            batch = data.transform_batch(batch, training=False)
        else:
            batch = data.on_after_batch_transfer(batch, 0)
        for name, rows in rows_by_name(predictor.step(batch)).items():
            if has_masks and isinstance(rows, Tensor) and rows.dim() == 4:
                rows = predicted_masks(rows)
            outputs[name] += [row.cpu() for row in rows]
        targets = targets_of(batch)
        true += targets.cpu() if isinstance(targets, Tensor) else []
    return outputs, true


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


def rows_by_name(outputs: Any) -> dict[str, Any]:
    """What predict_step returns for a batch: the tensors of a dict or tuple by their names. A list
    of dicts has a dict for each sample. Raises UserError for anything else."""
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
    np.savez(path, **content)  # type: ignore[arg-type]


def write_masks(folder: Path, names: list[str], outputs: Rows) -> None:
    """Palette images of the class indices, with the names of the inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [(folder / f"{Path(name).stem}.png").resolve() for name in names]
    if len({*paths, *(Path(name).resolve() for name in names)}) < 2 * len(names):
        what = "two inputs have one name, or an input is in this folder"
        raise UserError(f"--output {folder}: {what}\ngive another folder, or FILE.npz", 2)
    for path, mask in zip(paths, single(outputs), strict=True):
        if mask.dim() != 2 or (mask.byte() != mask).any():
            what = f"predict_step returns {mask.dtype} {tuple(mask.shape)} for a sample, no mask"
            raise UserError(f"{what} of 256 classes at most\ngive --output FILE.npz", 2)
        image = Image.fromarray(mask.byte().numpy()).convert("P")
        image.putpalette(PALETTE.flatten().tolist())
        image.save(path)


def single(outputs: Rows) -> list[Tensor]:
    """The outputs, if predict_step returns one tensor. Raises UserError otherwise."""
    if outputs.keys() - {"prediction"}:
        what = f"predict_step returns {', '.join(outputs)}, which is no table"
        raise UserError(f"{what}\n--output FILE.npz writes any tensors", 2)
    return outputs.get("prediction", [])


def write_table(
    options: Any, data: Any, names: list[str], outputs: Rows, true: list[Tensor]
) -> None:
    """A CSV file, or a table on stdout."""
    rows = single(outputs)
    if options.task == "multilabel" and rows:  # all together say whether they are logits
        rows = list(probabilities(torch.stack(rows)))
    table: list[tuple[str, ...]] = []
    for i, (name, values) in enumerate(zip(names, rows, strict=True)):
        cells = [("file" if options.files else "sample", name), *cells_of(values, data, options)]
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
    if options.task not in ("multiclass", "multilabel") or values.shape != (len(names),):
        if options.top_k != 1 or options.probabilities:
            what = "--top_k and --probabilities need classes, and (N, classes) of predict_step"
            raise UserError(f"{what}, which returned {tuple(values.shape)} for a sample", 2)
        is_text = options.task == "text" and not values.is_floating_point()
        return [("text", data.to_text(values))] if is_text else number_cells(values, "prediction")
    if options.task == "multilabel":
        cells = [("labels", labels(values > options.threshold, names))]
    else:
        cells = class_cells(values, names, options.top_k)
    if options.probabilities:
        cells += [(f"probability_{n}", f"{v:.4f}") for n, v in zip(names, values, strict=True)]
    return cells


def class_cells(values: Tensor, names: list[str], top_k: int) -> Cells:
    if not 0 < top_k <= len(names):
        raise UserError(f"--top_k {top_k}: there are {len(names)} classes", 2)
    cells = []
    for k, i in enumerate(values.argsort(descending=True)[:top_k].tolist(), start=1):
        end = f"_{k}" if k > 1 else ""
        cells += [(f"class{end}", names[i]), (f"probability{end}", f"{values[i]:.4f}")]
    return cells


def number_cells(values: Tensor, name: str) -> Cells:
    if values.numel() > MAX_COLUMNS:
        what = f"predict_step returns {tuple(values.shape)} for a sample, too much for a table"
        raise UserError(f"{what}\n--output FILE.npz writes it", 2)
    numbers = [f"{value:.6g}" for value in values.flatten().tolist()]
    if len(numbers) == 1:
        return [(name, numbers[0])]
    return [(f"{name}_{i}", number) for i, number in enumerate(numbers)]
