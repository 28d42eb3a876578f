"""What is wrong with samples although a network can train on them: test samples in the
training set, equal inputs with two labels, and columns that tell nothing or too much.

Each check returns lines for what it finds.
"""

import filecmp
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightbase.data.loader import DatasetSamples, TensorBatches
from lightbase.data.module import BaseDataModule
from lightbase.data.splits import class_numbers, lists_of_files
from lightbase.data.tensors import inputs_of, targets_of

MAX_BYTES = 2**30
"""Larger arrays are not read: a GiB takes about a second."""

MAX_FILES = 30_000

MIN_SAMPLES = 20
"""With fewer samples of a class, a column may sort the classes by chance."""

MISTAKES = {
    "train": "training samples have the inputs of another one, and another label",
    "val": "validation samples are training samples, too",
    "test": "test samples are training samples, too",
}


def check_rows(data: BaseDataModule) -> list[str]:
    """Return a line for each split with samples whose inputs are those of a training
    sample, byte for byte. Of training samples only those count that have another label.
    """
    lines = []
    first: dict[Any, Any] = {}
    for split, text in MISTAKES.items():
        pairs = []
        find = first.setdefault if split == "train" else first.get
        for key, label, place in rows_of(data.splits.get(split), split):
            other_label, other = find(key, (label, place))
            if label != other_label and is_same(place, other):
                pairs.append(f"{place} and {other}")
        if pairs:
            lines.append(f"{len(pairs):,} {text}, such as {pairs[0]}")
    return lines


def rows_of(samples: Any, split: str) -> Iterator[tuple[Any, Any, Any]]:
    """Yield for each sample: a key, which only equal inputs share, or files of one size
    and beginning; a label; and the file, or the position in what `load` returns.

    The samples have to be pairs of one tensor and a target. Files are read if there is
    one for each sample.
    """
    batch = isinstance(
        samples, TensorBatches | DatasetSamples
    ) and samples.__getitems__([0])
    if not isinstance(inputs_of(batch), Tensor) or targets_of(batch) is None:
        return
    labels = class_numbers(replace(samples, index=None))
    index, name = [*range(len(samples))], split
    if samples.index is not None:
        index, name = samples.index.tolist(), "train"  # it is a part of that
    places: list[Any] = [f"{name}[{i}]" for i in index]
    keys: list[Any] = []
    if isinstance(samples, TensorBatches):
        x = samples.all_values[0]
        if x.nbytes <= MAX_BYTES:
            rows = x.cpu().unsqueeze(-1).contiguous().view(torch.uint8).numpy()
            keys = [hash(rows[i].tobytes()) for i in index]
    elif labels is not None:
        for files in lists_of_files(samples.dataset):
            if len({*files}) == len(labels) <= MAX_FILES:
                places = [Path(files[i]) for i in index]
                keys = [key_of(file) for file in places]
    known: Any = repeat(split)
    if labels is not None and split == "train":
        known = labels[index].tolist()
    yield from zip(keys, known, places, strict=False)


def key_of(file: Path) -> Any:
    return file.stat().st_size, hash(np.fromfile(file, "u1", 4096).tobytes())


def is_same(place: Any, other: Any) -> bool:
    """Return whether two files have the same content. Rows of one key have."""
    return isinstance(place, str) or filecmp.cmp(place, other, shallow=False)


def check_columns(data: BaseDataModule) -> list[str]:
    """Return a line for each column of a table that is constant in the training set, or
    in which each class has a range of its own."""
    samples, spec = data.splits["train"], data.input_spec
    if not isinstance(samples, TensorBatches) or spec is None or spec.dim() != 2:
        return []
    if not spec.is_floating_point():  # numbers of tokens, say
        return []
    table, labels = inputs_of(samples.values), class_numbers(samples)
    marked = {"one value in all training samples: leave it out": table == table[0]}
    if labels is not None:
        counts = labels.unique(return_counts=True)[1]
        parts = table[labels.argsort()].split(counts.tolist())
        lows = torch.stack([part.amin(0) for part in parts]).sort(0).values
        highs = torch.stack([part.amax(0) for part in parts]).sort(0).values
        if len(counts) > 1 and counts.min() >= MIN_SAMPLES:
            text = "a range of its own for each class: leave it out if it is the label"
            marked[f"{text}, or numbers the samples"] = highs[:-1] < lows[1:]
    names = data.columns or range(table.shape[1])
    return [
        f"column {names[i]} has {text}"
        for text, is_so in marked.items()
        for i in is_so.all(0).nonzero()[:3]
    ]
