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

Names = list[str]
Rows = dict[str, list[Tensor]]
"""The outputs of each sample, by their name in what predict_step returns."""
Columns = dict[str, Names]
"""The texts of a table's columns, by the names of the columns."""


def write_arrays(path: Path, names: Names, outputs: Rows) -> None:
    """Write an npz file with an array (N, ...) for each name of `outputs`. If the
    samples differ in shape, it has an array NAME.i for each sample i.

    names: The names of the samples; they are the array `names`.
    """
    content = {"names": np.array(names)}
    for name, rows in outputs.items():
        arrays = [numpy_array(row) for row in rows]
        try:
            content[name] = np.stack(arrays)
        except ValueError:  # the samples differ in shape
            content |= {f"{name}.{i}": array for i, array in enumerate(arrays)}
    buffer = io.BytesIO()
    np.savez(buffer, **content)  # type: ignore[arg-type]
    write_whole(path, buffer.getbuffer())


def numpy_array(tensor: Tensor) -> np.ndarray:
    """Return the tensor as an array. bfloat16, which NumPy lacks, becomes float32."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


def write_masks(folder: Path, names: Names, outputs: Rows) -> None:
    """Write palette images of the class numbers.

    folder: It is made if it is missing.
    names: The names of the samples. A mask of photo.jpg is photo.png.
    outputs: Class numbers (H, W) of each sample, in [0, 255].
    Raise UserError if an input or another mask would be overwritten, or if there are
    too many classes.
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
        if mask.max() > 255:
            raise UserError(
                f"--output {folder}: a mask has at most 256 classes, not class "
                f"{mask.max()}",
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
    return outputs["prediction"]


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
    have no such column. A class below 0, such as -100, means a sample without a label
    and is a number.

    true: The targets of the samples; empty if there are none.
    task: The attribute `task` of the module.
    """
    if task == "multiclass" and true:
        classes = torch.stack(true).flatten().tolist()
        names = dict(enumerate(class_names(data, 0)))
        return {"true": [names.get(i, str(i)) for i in classes]}
    if task == "regression" and true:
        return number_columns(true, "true")
    return {}


def class_columns(
    values: Tensor, names: Names, task: str | None, options: Namespace
) -> Columns:
    """Return the columns of the likeliest classes, or the column of the labels.

    values: Probabilities (N, classes), or outputs (N, labels) for multilabel.
    names: The names of the classes.
    options: `top_k` counts for classes, and `threshold` for labels.
    Raise UserError if there are fewer classes than --top_k, or if it is below 1.
    """
    columns = {}
    top_k = options.top_k
    if task == "multilabel":
        values = probabilities(values)
        is_set = values > options.threshold
        columns["labels"] = [label_names(row, names) for row in is_set]
        if top_k != 1:
            problem = "--top_k is for classes, and this network has labels"
            raise UserError(problem, "--probabilities writes all of them", 2)
    elif not 0 < top_k <= len(names):
        problem = f"--top_k {top_k}: there are {len(names)} classes"
        raise UserError(problem, status=2)
    else:
        shares, classes = values.topk(top_k)
        for k in range(top_k):
            end = f"_{k + 1}".removesuffix("_1")
            columns[f"class{end}"] = [names[i] for i in classes[:, k]]
            columns[f"probability{end}"] = texts(shares[:, k], ".4f")
    if options.probabilities:
        for i, name in enumerate(names):
            columns[f"probability_{name}"] = texts(values[:, i], ".4f")
    return columns


def number_columns(rows: list[Tensor], name: str) -> Columns:
    """Return a column NAME of numbers, or columns NAME_i if a sample has several.

    rows: A tensor of one shape for each sample.
    """
    values = torch.stack(rows).reshape(len(rows), -1)
    if values.shape[1] == 1:
        return {name: texts(values[:, 0], ".6g")}
    columns = enumerate(values.unbind(1))
    return {f"{name}_{i}": texts(column, ".6g") for i, column in columns}


def texts(values: Tensor, form: str) -> Names:
    """Return texts of numbers (N,), in this form, such as ".4f"."""
    return [f"{value:{form}}" for value in values.tolist()]
