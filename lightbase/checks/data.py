"""What is wrong with samples although a network can train on them: test samples in the
training set, equal inputs with two labels, and columns that tell nothing or too much.
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
from lightbase.data.tensors import rows_of, targets_of

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


def check_samples(data: BaseDataModule) -> Iterator[str]:
    """Yield a line for each split with samples whose inputs are those of a training
    sample, byte for byte. Of training samples only those count that have another label.
    """
    first: dict[Any, Any] = {}
    for split, text in MISTAKES.items():
        pairs = []
        for key, label, place in content_of(data.splits.get(split), split):
            other_label, other = first.setdefault(key, (label, place))
            if label == other_label:
                continue
            # files of one key have some equal bytes
            if isinstance(place, str) or filecmp.cmp(place, other, shallow=False):
                pairs.append(f"{place} and {other}")
        if pairs:
            yield f"{len(pairs):,} {text}, such as {pairs[0]}"


def content_of(samples: Any, split: str) -> Iterator[tuple[Any, Any, Any]]:
    """Return for each sample: a key, which equal inputs share; a label; and the file,
    or the position in what `load` returns. Nothing of what is not read."""
    if not isinstance(samples, TensorBatches | DatasetSamples):
        return iter(())
    places: list[Any] = []
    keys = []
    labels: Any = repeat(split == "train" or None)
    numbers = class_numbers(replace(samples, index=None))
    index: Any = torch.arange(len(samples))
    name = split
    if samples.index is not None:
        index, name = samples.index, "train"  # it is a part of that
    x = inputs_in_memory(samples)
    if x is not None:
        rows = x.cpu().unsqueeze(-1).contiguous().view(torch.uint8).numpy()
        keys = [hash(rows[i].tobytes()) for i in index.tolist()]
        places = [f"{name}[{i}]" for i in index.tolist()]
    elif numbers is not None and isinstance(samples, DatasetSamples):
        for files in lists_of_files(samples.dataset):
            is_own = len({*files}) == len(numbers) <= MAX_FILES  # a file for each
            if is_own and Path(files[0]).is_file():  # names may lack a folder
                places = [Path(files[i]) for i in index]
        keys = [middle_of(file) for file in places]
    if keys and split == "train" and numbers is not None:
        labels = numbers[index].tolist()
    return zip(keys, labels, places, strict=False)


def middle_of(file: Path) -> int:
    """Return a hash of some bytes of a file: images may have equal borders."""
    return hash(
        np.fromfile(file, "u1", 4096, offset=file.stat().st_size // 2).tobytes()
    )


def inputs_in_memory(samples: Any) -> Tensor | None:
    """Return the inputs of arrays if they are a pair of tensors, not only those of the
    split, or None."""
    if (
        isinstance(samples, TensorBatches)
        and targets_of(samples.all_values) is not None
    ):
        x = samples.all_values[0]
        if isinstance(x, Tensor) and x.nbytes <= MAX_BYTES:
            return x
    return None


def check_columns(data: BaseDataModule) -> Iterator[str]:
    """Yield a line for each column of a table that has one value in the training set,
    or a range of its own for each class."""
    samples: Any = data.splits["train"]
    table = inputs_in_memory(samples)
    if table is None or table.dim() != 2 or not table.is_floating_point():
        return
    table, labels = rows_of(table, samples.index), class_numbers(samples)
    if labels is None:
        labels = torch.zeros(len(table))
    counts = labels.unique(return_counts=True)[1]
    parts = table[labels.argsort()].split(counts.tolist())
    # the lowest and the highest value of each class, (classes, 2, columns)
    ends = torch.stack([torch.stack(part.aminmax(dim=0)) for part in parts])
    lows, highs = ends.sort(0).values.unbind(1)
    found = {"one value in all training samples: leave it out": lows[0] == highs[-1]}
    if len(counts) > 1 and counts.min() >= MIN_SAMPLES:
        text = "a range of its own for each class: leave it out if it is made from the "
        found[f"{text}label, or numbers the samples"] = (highs[:-1] < lows[1:]).all(0)
    names = data.columns or range(table.shape[1])
    for text, is_so in found.items():
        for i in is_so.nonzero()[:3]:
            yield f"column {names[i]} has {text}"
