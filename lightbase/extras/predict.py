"""Predictions as files: arrays, masks, images, and tables of classes, labels, numbers
or texts.

`write_arrays` and `write_pictures` write a file or a folder. `prediction_columns` and
`true_columns` give the columns of a table; the task of the module decides which ones.
"""

import io
from argparse import Namespace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lightbase.core.errors import UserError
from lightbase.core.files import write_whole
from lightbase.core.predictions import (
    PALETTE,
    class_names,
    probabilities,
)

Names = list[str]
Rows = list[Tensor]
"""The outputs of each sample."""
Columns = dict[str, Names]
"""The texts of a table's columns, by the names of the columns."""


def write_arrays(path: Path, names: Names, outputs: dict[str, Rows]) -> None:
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


def are_pictures(rows: Rows, task: str | None) -> bool:
    """Return whether predictions are class numbers (H, W) or images (C, H, W).

    task: The attribute `task` of the module.
    """
    if not rows:
        return task == "segmentation"
    is_mask = rows[0].dim() == 2 and not rows[0].is_floating_point()
    return is_mask or rows[0].dim() == 3


def write_pictures(folder: Path, names: Names, rows: Rows) -> None:
    """Write a PNG file for each sample.

    folder: It is made if it is missing.
    names: The names of the samples. The picture of photo.jpg is photo.png.
    rows: See `picture`.
    Raise UserError if an input or another picture would be overwritten, or if PNG
    cannot hold the values.
    """
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
        buffer = io.BytesIO()
        picture(row).save(buffer, "png")
        write_whole(path, buffer.getbuffer())


def picture(row: Tensor) -> Image.Image:
    """Return a palette image of class numbers (H, W), or a grey or colour image of
    (C, H, W): uint8, or numbers in [0, 1]."""
    highest = 255
    if row.dim() == 3 and row.is_floating_point():
        highest = 1
    if row.min() < 0 or row.max() > highest:
        raise UserError(
            f"--output FOLDER takes 0 to {highest}, not {row.min():.3g} to "
            f"{row.max():.3g}",
            "clamp or scale them in predict_step, or give --output FILE.npz",
            2,
        )
    if row.dim() == 3:
        return to_pil_image(row)  # which scales floats
    image = Image.fromarray(row.byte().numpy()).convert("P")
    image.putpalette(PALETTE.flatten().tolist())
    return image


def prediction_columns(
    rows: Rows, data: Any, task: str | None, options: Namespace
) -> Columns:
    """Return the columns of the predictions for a table: classes, labels, texts or
    numbers.

    data: The data module, which knows the classes and how to write a text.
    task: The attribute `task` of the module.
    options: `top_k`, `probabilities` and `threshold` as in predict.py --help.
    Raise UserError if the options do not fit the task or the outputs.
    """
    if not rows:
        return {}
    shape = rows[0].shape
    names = class_names(data, shape.numel())
    has_classes = shape == (len(names),)
    if task == "multiclass" and has_classes:
        values = torch.stack(rows)
        columns = class_columns(values, names, options.top_k)
    elif task == "multilabel" and has_classes and options.top_k == 1:
        values = probabilities(torch.stack(rows))
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


def class_columns(values: Tensor, names: Names, top_k: int) -> Columns:
    """Return the columns of the likeliest classes.

    values: Probabilities (N, classes).
    names: The names of the classes.
    Raise UserError if there are fewer classes than `top_k`.
    """
    if top_k > len(names):
        raise UserError(f"--top_k {top_k}: there are {len(names)} classes", status=2)
    columns = {}
    shares, classes = values.topk(top_k)
    for k in range(top_k):
        end = f"_{k + 1}".removesuffix("_1")
        columns[f"class{end}"] = [names[i] for i in classes[:, k]]
        columns[f"probability{end}"] = texts(shares[:, k], ".4f")
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
