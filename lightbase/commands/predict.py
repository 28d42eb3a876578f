"""Predict with a checkpoint: what predict_step of its LightningModule returns.

Read `run` first. `run_loop` predicts by Lightning's loop. The outputs of all samples
are kept in memory, and then written as arrays, as masks or as a table. `predict` is for
Python.
"""

import copy
import io
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sized
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from lightbase.commands.checkpoint import open_checkpoint, open_run, trainer_of
from lightbase.commands.script import python_errors
from lightbase.config.errors import UserError
from lightbase.config.files import Values, as_csv, as_table, write_whole
from lightbase.data.image_folder import list_images
from lightbase.data.module import BaseDataModule, in_units
from lightbase.data.tensors import (
    NESTED,
    as_tensors,
    convert_types,
    native_array,
    targets_of,
    to_host,
)
from lightbase.model.predictions import (
    PALETTE,
    class_names,
    predicted_masks,
    prediction_step,
    predicts_probabilities,
    task_of,
)
from lightbase.run.devices import check_one_device

BATCH_SIZE = 256  # of files and arrays

STAGES = {"train": "fit", "val": "validate", "test": "test"}

Rows = list[Tensor]
"""A tensor for each sample."""

Names = list[str]

Columns = dict[str, Names]
"""The texts of a table's columns, by the names of the columns."""


def run(options: Namespace) -> None:
    """Write or print the predictions: all tensors to FILE.npz, masks into a folder, and
    others as a table. Files that cannot be read are reported at the end."""
    spec, model, data = open_checkpoint(options)
    config = spec.config.trainer
    check_one_device(config)
    is_npz = options.output is not None and options.output.suffix.lower() == ".npz"
    names: Names = []
    unreadable: Names = []
    if options.files:
        # both lists get their entries while the files are read
        samples = samples_in(data, options.files, names, unreadable)
        batches: Any = batches_of(samples, data)
    else:
        batches = loader_of_split(data, options.split)
        names += map(str, range(len(batches.dataset)))
    with trainer_of(spec, model, []) as trainer:
        # a file .npz may hold the probabilities of each pixel, too
        outputs, true = run_loop(trainer, model, data, batches, with_masks=not is_npz)
    if config.fast_dev_run or config.limit_predict_batches is not None:
        # the Trainer has left out the batches after a limit
        names = names[: len(next(iter(outputs.values()), []))]
    if any(len(rows) != len(names) for rows in outputs.values()):
        raise UserError(
            f"predict_step has no row for each of the {len(names)} inputs",
            "return tensors (N, ...), also in a dict or tuple",
        )
    if is_npz:
        write_arrays(options.output, names, outputs)
    else:
        write_single(options, names, outputs, true, data, model)
    if options.output is not None:
        print(f"{len(names)} predictions in {options.output}")
    if unreadable:
        raise UserError("\n".join(unreadable))


def write_single(
    options: Namespace,
    names: Names,
    outputs: dict[str, Rows],
    true: Rows,
    data: Any,
    model: Any,
) -> None:
    """Write the outputs of a predict_step that returns one tensor."""
    if outputs.keys() - {"prediction"}:
        raise UserError(
            f"predict_step returns {', '.join(outputs)}, which does not fit a table",
            "--output FILE.npz writes any tensors",
            2,
        )
    rows = outputs["prediction"]
    is_mask = bool(rows) and rows[0].dim() == 2 and not rows[0].is_floating_point()
    is_folder = options.output is not None and options.output.suffix == ""
    if is_mask != is_folder:
        raise UserError(
            "for masks give --output FOLDER or FILE.npz",
            "for other predictions FILE.csv or FILE.npz",
            2,
        )
    if is_mask:
        write_masks(options.output, names, rows)
        return
    # a plain LightningModule may have no task; then its outputs are numbers
    task = getattr(model, "task", None)
    columns = prediction_columns(rows, data, model, task, options)
    columns |= true_columns(true, data, task)
    first = "file" if options.files else "sample"
    table = [(first, *columns), *zip(names, *columns.values(), strict=True)]
    if options.output is None:
        print("\n".join(as_table(table)))
    else:
        write_whole(options.output, as_csv(table))


def loader_of_split(data: LightningDataModule, split: str) -> Any:
    """Return batches of the samples of a split, in the order of the data set, or of the
    own loader of a plain LightningDataModule. split: "train", "val" or "test"."""
    data.prepare_data()
    data.setup(STAGES[split])
    splits = data.splits if isinstance(data, BaseDataModule) else {}
    if isinstance(splits.get(split), Sized):  # a stream has no length
        return data.predict_dataloader(split)  # type: ignore[call-arg]
    hook = f"{split}_dataloader"
    loader = is_overridden(hook, data) and getattr(data, hook)()
    if not isinstance(getattr(loader, "dataset", None), Sized):
        raise UserError(
            f"--split {split}: the data has no such set with a length",
            f"{hook} gives one loader of a data set with a length",
            2,
        )
    return loader


def batches_of(samples: Iterator[Any], data: Any) -> Iterator[Any]:
    """Yield batches of at most BATCH_SIZE samples. A batch that is one tensor becomes
    the pair (inputs, None), which predict_step takes."""
    collate, keeps_float64 = default_collate, False
    if isinstance(data, BaseDataModule):
        collate, keeps_float64 = data.collate, data.keeps_float64
    while waiting := list(islice(samples, BATCH_SIZE)):
        batch = convert_types(collate(waiting), keeps_float64)
        if isinstance(batch, Tensor):
            batch = (batch, None)
        yield batch


def samples_in(
    data: Any, paths: list[Path], names: Names, unreadable: Names
) -> Iterator[Any]:
    """Yield each sample in the files. A folder means all images below it.

    names, unreadable: Get the names of the samples, and an error for each file that
        cannot be read.
    """
    if not isinstance(data, BaseDataModule):
        raise UserError(
            f"files need a BaseDataModule, which {type(data).__name__} is not",
            "without files the test set is predicted",
            2,
        )
    for path in paths:
        for file in list_images(path) or [path]:
            try:
                if not file.exists():
                    raise UserError("no such file", "give the path of a file or folder")
                for name, sample in data.read_inputs(file):
                    names.append(name)
                    yield sample
            except (UserError, OSError) as error:
                unreadable.append(f"cannot read {file}: {error}")


def run_loop(
    trainer: Any, model: Any, data: Any, batches: Any, with_masks: bool = False
) -> tuple[dict[str, Rows], Rows]:
    """Predict the batches by Lightning's loop. Return the outputs of predict_step by
    the names of `rows_by_name`, and the targets that are tensors.

    model, data: They stay as they are: hooks of copies are replaced.
    with_masks: Of a segmentation keep the class of each pixel, not the probabilities,
        which take more memory.
    """
    outputs: dict[str, Rows] = defaultdict(list)
    true: Rows = []
    model, data = copy.copy(model), copy.copy(data)
    step = prediction_step(model)

    def predict_step(batch: Any, *args: Any) -> Any:
        results = in_units(data, step(batch, *args))
        for name, rows in rows_by_name(results).items():
            is_segmentation = task_of(model, rows) == "segmentation"
            if with_masks and is_segmentation and rows.dim() == 4:
                rows = predicted_masks(rows, predicts_probabilities(model, rows))
            outputs[name] += to_host(rows)  # one copy for a batch
        targets = targets_of(batch)
        if isinstance(targets, Tensor):
            true.extend(to_host(in_units(data, targets)))
        return results

    model.predict_step = predict_step
    data.predict_dataloader = lambda: batches
    # A split is set up by now, and files need no data set.
    data.prepare_data = lambda: None
    data.setup = lambda stage: None
    trainer.predict(model, datamodule=data, return_predictions=False)
    return outputs, true


def rows_by_name(outputs: Any) -> Values:
    """Return the outputs for a batch as {name: rows}. Rows are a tensor (N, ...), or a
    list with a value for each sample.

    outputs: What predict_step returns: a tensor, named "prediction"; a dict; a tuple or
        list, whose tensors are named "0", "1" and so on; or as detectors do, a list
        with a dict for each sample.
    """
    if isinstance(outputs, list) and outputs and isinstance(outputs[0], dict):
        return {name: [sample[name] for sample in outputs] for name in outputs[0]}
    if isinstance(outputs, tuple | list):
        return {str(i): rows for i, rows in enumerate(outputs)}
    if isinstance(outputs, dict):
        return outputs
    return {"prediction": outputs}


def predict(run: Any, inputs: Any) -> Any:
    """Return what predict_step gives for the inputs, as a tensor (N, ...) on the CPU,
    or {name: tensor} if it gives several. Outputs that differ in shape are in a list.
    The transforms of the run's data are applied, on its device and in its precision.

    run: A name or a path as for `lightbase.load`, a result of `lightbase.train`, a
        module that it has trained, or what `lightbase.load` returns.
    inputs: Inputs as `load` of the data returns them: an array or a tensor (N, ...), or
        a list of samples. For one sample without N, the outputs have no N either. Or
        the path of a file or of a folder of images, or a list of paths.

    Raise UserError for inputs that the data could not have, and for unreadable files.
    """
    unreadable: Names = []
    is_single = False
    with python_errors():
        trainer, module, data = open_run(run, [])
        if isinstance(inputs, str | Path):
            inputs = [inputs]
        if isinstance(inputs, list) and isinstance(next(iter(inputs), 0), str | Path):
            samples = samples_in(data, [*map(Path, inputs)], [], unreadable)
        else:
            values, is_single = as_inputs(inputs, data)
            samples = iter(values)
        outputs, _ = run_loop(trainer, module, data, batches_of(samples, data))
        if unreadable:
            raise UserError("\n".join(unreadable))
    results: Values = {**outputs}
    for name, rows in outputs.items():
        if is_single:
            results[name] = rows[0]
        elif len({row.shape for row in rows}) == 1:
            results[name] = torch.stack(rows)
    if results.keys() == {"prediction"}:
        return results["prediction"]
    return results


def as_inputs(inputs: Any, data: Any) -> tuple[Any, bool]:
    """Return inputs as a tensor (N, ...), or a list of samples as it is, and whether
    they were one sample without N. If the data's inputs are one tensor, shape and dtype
    have to fit."""
    spec = getattr(data, "input_spec", None)
    is_list = isinstance(inputs, list | tuple)
    if spec is None or (is_list and any(isinstance(x, NESTED) for x in inputs)):
        # torch takes no array with negative strides
        arrays = apply_to_collection(inputs, np.ndarray, native_array)
        return arrays, False
    values = convert_types(as_tensors(inputs), data.keeps_float64)
    is_single = values.dim() < spec.dim()
    if is_single:
        values = values[None]
    is_rounded = values.is_floating_point() > spec.is_floating_point()
    if is_rounded or values.shape[1:] != spec.shape[1:]:
        raise UserError(
            f"the inputs are {values.dtype} {tuple(values.shape)}",
            f"samples of the data are {spec.dtype} {tuple(spec.shape[1:])}; a list of "
            "samples may have any shapes",
        )
    return values.to(spec.dtype), is_single


def write_arrays(path: Path, names: Names, outputs: dict[str, Rows]) -> None:
    """Write an npz file with an array (N, ...) for each name of `outputs`, or an array
    NAME.i for each sample i if they differ in shape, and the array `names`."""
    content = {"names": np.array(names)}
    for name, rows in outputs.items():
        arrays = []
        for row in rows:
            if row.dtype == torch.bfloat16:  # which NumPy lacks
                row = row.float()
            arrays.append(row.numpy())
        try:
            content[name] = np.stack(arrays)
        except ValueError:  # the samples differ in shape
            content |= {f"{name}.{i}": array for i, array in enumerate(arrays)}
    buffer = io.BytesIO()
    np.savez(buffer, **content)  # type: ignore[arg-type]
    write_whole(path, buffer.getbuffer())


def write_masks(folder: Path, names: Names, rows: Rows) -> None:
    """Write a palette image for each sample, whose pixels are the class numbers, at
    most 255. The mask of photo.jpg is photo.png. No input, and no other of these masks,
    is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{Path(name).stem}.png" for name in names]
    files = {path.resolve() for path in [*paths, *map(Path, names)]}
    if len(files) < 2 * len(names):
        raise UserError(
            f"--output {folder}: two inputs have one name, or an input is in this "
            "folder",
            "give another folder, or FILE.npz",
            2,
        )
    for path, row in zip(paths, rows, strict=True):
        if row.min() < 0 or row.max() > 255:
            raise UserError(f"--output {folder}: a mask has classes from 0 to 255")
        image = Image.fromarray(row.byte().numpy()).convert("P")
        image.putpalette(PALETTE.flatten().tolist())
        buffer = io.BytesIO()
        image.save(buffer, "png")
        write_whole(path, buffer.getbuffer())


def prediction_columns(
    rows: Rows, data: Any, model: Any, task: str | None, options: Namespace
) -> Columns:
    """Return the columns of the predictions for a table: classes, labels, texts or
    numbers. options: `top_k`, `probabilities` and `threshold` as in --help."""
    if not rows:
        return {}
    shape = rows[0].shape
    names = class_names(data, shape.numel())
    has_classes = shape == (len(names),)
    if task == "multiclass" and has_classes:
        values = torch.stack(rows)
        columns = class_columns(values, names, options.top_k)
    elif task == "multilabel" and has_classes and options.top_k == 1:
        values = torch.stack(rows)
        if not predicts_probabilities(model, values):
            values = values.sigmoid()
        is_set = (values > options.threshold).tolist()
        columns = {"labels": [", ".join(compress(names, row)) for row in is_set]}
    elif options.top_k > 1 or options.probabilities:
        raise UserError(
            "--top_k is for task multiclass, and --probabilities for multilabel, too; "
            f"task {task} has outputs {tuple(shape)} of a sample",
            status=2,
        )
    elif task == "text" and not rows[0].is_floating_point():
        return {"text": [data.to_text(row) for row in rows]}
    else:
        return number_columns(rows, "prediction")
    if options.probabilities:
        for name, shares in zip(names, values.unbind(1), strict=True):
            columns[f"probability_{name}"] = texts(shares, ".4f")
    return columns


def true_columns(true: Rows, data: Any, task: str | None) -> Columns:
    """Return the column of true classes, or the columns of true numbers. A class below
    0, such as -100, means a sample without a label and is a number."""
    if task == "multiclass" and true:
        classes = torch.stack(true).flatten().tolist()
        names = dict(enumerate(class_names(data, 0)))
        return {"true": [names.get(i, str(i)) for i in classes]}
    if task == "regression" and true:
        return number_columns(true, "true")
    return {}


def class_columns(values: Tensor, names: Names, top_k: int) -> Columns:
    """Return the columns of the likeliest classes. values: Shares (N, classes)."""
    if top_k > len(names):
        raise UserError(f"--top_k {top_k}: there are {len(names)} classes", status=2)
    columns = {}
    shares, classes = values.topk(top_k)
    for k in range(top_k):
        end = f"_{k + 1}".removesuffix("_1")
        columns[f"class{end}"] = [names[i] for i in classes[:, k]]
        columns[f"probability{end}"] = texts(shares[:, k], ".4f")
    return columns


def number_columns(rows: Rows, name: str) -> Columns:
    """Return a column NAME of numbers, or columns NAME_i if a sample has several."""
    columns = torch.stack(rows).reshape(len(rows), -1).unbind(1)
    if len(columns) == 1:
        return {name: texts(columns[0], ".6g")}
    return {f"{name}_{i}": texts(x, ".6g") for i, x in enumerate(columns)}


def texts(values: Tensor, form: str) -> Names:
    return [f"{value:{form}}" for value in values.tolist()]
