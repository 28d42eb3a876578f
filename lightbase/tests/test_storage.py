"""Samples in other people's storage: arrays that stay in files, and Datasets that read
a batch at once."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from paths import Train
from small import Points

from lightbase.core.batches import DatasetSamples, TensorBatches
from lightbase.core.data import as_samples


class Table:
    """A table that is no torch Dataset, such as those of the package `datasets`."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.reads: list[list[int]] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"inputs": index}

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        self.reads.append(indices)
        return [self[index] for index in indices]


def test_a_table_is_read_batch_by_batch():
    table = Table(10)
    samples = as_samples(table, "the train set", None)
    assert isinstance(samples, DatasetSamples)
    part = samples.select(torch.tensor([3, 5, 7]))
    assert part.__getitems__([0, 2])["inputs"].tolist() == [3, 7]
    assert table.reads == [[3, 7]]
    assert part[1] == {"inputs": 5}


def test_arrays_with_a_collate():
    values = (np.arange(6), np.arange(6))
    samples = as_samples(values, "the train set", lambda batch: [x for x, _ in batch])
    part = samples.select(torch.tensor([4, 2]))
    assert [int(x) for x in part.__getitems__([0, 1])] == [4, 2]


@pytest.fixture
def mapped(tmp_path):
    """Inputs (1000, 1000), float64, 8 MB in a file that is only read, and targets."""
    np.save(tmp_path / "x.npy", np.arange(1e6).reshape(1000, 1000))
    return np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(1000) % 2


def test_mapped_arrays_are_converted_by_batch(mapped):
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        samples = as_samples(mapped, "the train set", None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6
    assert isinstance(samples, TensorBatches)
    assert samples.all_values[0].data_ptr() == mapped[0].ctypes.data  # no copy
    inputs, targets = samples.select(torch.arange(10, 20)).__getitems__([1, 3])
    assert inputs.dtype == torch.float32
    assert inputs[:, 0].tolist() == [11_000, 13_000]
    assert targets.tolist() == [1, 1]


class Mapped(Points):
    """Points whose inputs stay in a file."""

    def load(self, split):
        inputs, targets = super().load(split)
        path = self.data_dir / f"{split}.npy"
        np.save(path, inputs.double().numpy())
        return np.load(path, mmap_mode="r"), targets


def test_mapped_arrays_train_as_arrays_in_memory(train: Train, tmp_path, recwarn):
    flags = f"--model.net.sizes [10,2] --data.data_dir {tmp_path} --data.batch_size 8"
    results = [
        train("--data", f"{name}", "--name", name.replace(".", "_"), *flags.split())
        for name in ("small.Points", "test_storage.Mapped")
    ]
    losses = [metrics["test/loss"] for metrics in results]
    assert losses[0] == losses[1]
    assert not [x for x in recwarn if "not writable" in str(x.message)]


def test_a_data_module_without_a_trainer():
    data = Points(batch_size=10)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        inputs, targets = next(iter(loader))
        assert inputs.shape == (10, 10)
        assert targets.shape == (10,)
    assert len(data.test_dataloader()) == 3
    sample, target = data.splits["train"][0]
    assert sample.shape == (10,)
    assert target.shape == ()
