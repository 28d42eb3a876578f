"""Predictions as files: arrays, masks, and tables of classes, labels, numbers or texts.

`write_arrays` and `write_masks` write a file or a folder. `prediction_columns` and
`true_columns` give the columns of a table; the task of the module decides which ones.
"""

import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightbase.core.errors import UserError
from lightbase.core.files import write_whole
from lightbase.core.predictions import (
    PALETTE,
    class_names,
    label_names,
    probabilities,
)

MAX_COLUMNS = 100  # of numbers in a table
Rows = dict[str, list[Tensor]]
"""The outputs of each sample, by their name in what predict_step returns."""
Columns = dict[str, list[str]]
"""The texts of a table's columns, by the names of the columns."""


def write_arrays(path: Path, names: list[str], outputs: Rows) -> None:
    """Write an npz file with an array (N, ...) for each name of `outputs`. If the
    samples differ in shape, it has an array NAME.i for each sample i.

    names: The names of the samples; they are the array `names`.
    """
    content = {"names": np.array(names)}
    for name, rows in outputs.items():
        arrays = [numpy_array(row) for row in rows]
        if len({array.shape for array in arrays}) == 1:
            content[name] = np.stack(arrays)
        else:
            for i, array in enumerate(arrays):
                content[f"{name}.{i}"] = array
    buffer = io.BytesIO()
    np.savez(buffer, **content)  # type: ignore[arg-type]
    write_whole(path, buffer.getbuffer())


def numpy_array(tensor: Tensor) -> np.ndarray:
    """Return the tensor as an array. bfloat16, which NumPy lacks, becomes float32."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


def write_masks(folder: Path, names: list[str], outputs: Rows) -> None:
    """Write palette images of the class numbers.

    folder: It is made if it is missing.
    names: The names of the samples. A mask of photo.jpg is photo.png.
    outputs: Class numbers (H, W) of each sample, in [0, 255].
    Raise UserError if an input or another mask would be overwritten, or if an output is
    no mask.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [(folder / f"{Path(name).stem}.png").resolve() for name in names]
    inputs = [Path(name).resolve() for name in names]
    if len({*paths, *inputs}) < 2 * len(names):
        raise UserError(
            f"--output {folder}: two inputs have one name, or an input is in this "
            "folder",
            "give another folder, or FILE.npz",
            2,
        )
    for path, mask in zip(paths, single(outputs), strict=True):
        if mask.dim() != 2 or (mask.byte() != mask).any():
            raise UserError(
                f"predict_step returns {mask.dtype} {tuple(mask.shape)} for a sample, "
                "no mask of 256 classes at most",
                "give --output FILE.npz",
                2,
            )
        image = Image.fromarray(mask.byte().numpy()).convert("P")
        image.putpalette(PALETTE.flatten().tolist())
        buffer = io.BytesIO()
        image.save(buffer, "png")
        write_whole(path, buffer.getbuffer())


def single(outputs: Rows) -> list[Tensor]:
    """Return the outputs if predict_step returns one tensor. Raise UserError if it
    returns several."""
    if outputs.keys() - {"prediction"}:
        raise UserError(
            f"predict_step returns {', '.join(outputs)}, which is no table",
            "--output FILE.npz writes any tensors",
            2,
        )
    return outputs.get("prediction", [])


def prediction_columns(
    outputs: Rows, data: Any, task: str | None, options: Namespace
) -> Columns:
    """Return the columns of the predictions for a table: classes, labels, texts or
    numbers.

    outputs: One tensor for each sample, under the name "prediction".
    data: The data module, which knows the classes and how to write a text.
    task: The attribute `task` of the module.
    options: `top_k`, `probabilities` and `threshold` as in predict.py --help.
    Raise UserError if the outputs do not fit a table, or do not fit the options.
    """
    rows = single(outputs)
    if not rows:
        return {}
    names = class_names(data, rows[0].numel())
    has_classes = task in ("multiclass", "multilabel")
    if has_classes and rows[0].shape == (len(names),):
        return class_columns(torch.stack(rows), names, task, options)
    if options.top_k != 1 or options.probabilities:
        raise UserError(
            "--top_k and --probabilities need classes, and (N, classes) of "
            f"predict_step, which returned {tuple(rows[0].shape)} for a sample",
            status=2,
        )
    if task == "text" and not rows[0].is_floating_point():
        return {"text": [data.to_text(row) for row in rows]}
    return number_columns(rows, "prediction")


def true_columns(true: list[Tensor], data: Any, task: str | None) -> Columns:
    """Return the column of true classes, or the columns of true numbers. Other tasks
    have no such column.

    true: The targets of the samples; empty if there are none.
    task: The attribute `task` of the module.
    """
    if task == "multiclass" and true:
        classes = torch.stack(true)
        names = class_names(data, int(classes.max()) + 1)
        return {"true": [names[i] for i in classes]}
    if task == "regression" and true:
        return number_columns(true, "true")
    return {}


def class_columns(
    values: Tensor, names: list[str], task: str | None, options: Namespace
) -> Columns:
    """Return the columns of the likeliest classes, or the column of the labels.

    values: Probabilities (N, classes), or outputs (N, labels) for multilabel.
    names: The names of the classes.
    options: `top_k` counts for classes, and `threshold` for labels.
    Raise UserError if there are fewer classes than --top_k, or if it is below 1.
    """
    columns = {}
    if task == "multilabel":
        values = probabilities(values)
        is_set = values > options.threshold
        columns["labels"] = [label_names(row, names) for row in is_set]
    elif 0 < options.top_k <= len(names):
        shares, classes = values.topk(options.top_k)
        for k in range(options.top_k):
            end = ""
            if k > 0:
                end = f"_{k + 1}"
            columns[f"class{end}"] = [names[i] for i in classes[:, k]]
            columns[f"probability{end}"] = decimals(shares[:, k])
    else:
        problem = f"--top_k {options.top_k}: there are {len(names)} classes"
        raise UserError(problem, status=2)
    if options.probabilities:
        for i, name in enumerate(names):
            columns[f"probability_{name}"] = decimals(values[:, i])
    return columns


def decimals(values: Tensor) -> list[str]:
    """Return texts of numbers (N,) with four decimals."""
    return [f"{value:.4f}" for value in values.tolist()]


def number_columns(rows: list[Tensor], name: str) -> Columns:
    """Return a column NAME of numbers, or columns NAME_i if a sample has several.

    rows: A tensor of any shape for each sample. Raise UserError if it has more than
        MAX_COLUMNS numbers, or if the shapes differ.
    """
    shape = tuple(rows[0].shape)
    if rows[0].numel() > MAX_COLUMNS or any(row.shape != shape for row in rows):
        raise UserError(
            f"predict_step returns {shape} for a sample, too much for a table",
            "--output FILE.npz writes it",
            2,
        )
    values = torch.stack(rows).reshape(len(rows), -1)
    columns = {}
    for i in range(values.shape[1]):
        key = name
        if values.shape[1] > 1:
            key = f"{name}_{i}"
        columns[key] = [f"{value:.6g}" for value in values[:, i].tolist()]
    return columns
