"""Samples in other people's storage: arrays that stay in files, and Datasets that read
a batch at once."""

import tracemalloc

import numpy as np
import pytest
import torch
from attached import attach
from given import Given

from lightbase.data.loader import DatasetSamples, as_samples


class Table:
    """A table that is no torch Dataset, such as those of the package `datasets`."""

    def __init__(self):
        self.reads = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"inputs": index}

    def __getitems__(self, indices):
        self.reads.append(indices)
        return [self[index] for index in indices]


def test_a_table_is_read_batch_by_batch():
    table = Table()
    samples = as_samples(table, "the train set", None)
    assert isinstance(samples, DatasetSamples)
    part = samples.select(torch.tensor([3, 5, 7]))
    assert part.__getitems__([0, 2])["inputs"].tolist() == [3, 7]
    assert table.reads == [[3, 7]]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_arrays_that_stay_in_their_file_are_read_and_converted_by_batch(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(1e6).reshape(1000, 1000))  # 8 MB
    inputs = np.load(tmp_path / "x.npy", mmap_mode="r")
    tracemalloc.start()
    loaded = inputs, np.arange(1000, dtype="uint16")
    data = attach(Given(loaded, classes=tuple("c" * 1000)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6
    train = data.splits["train"]
    assert train.all_values[0].data_ptr() == inputs.ctypes.data  # no copy
    rows, targets = train.__getitems__([1, 3])
    assert rows.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert rows[:, 0].tolist() == (1000 * targets).tolist()
