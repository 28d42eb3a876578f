"""What a worker of a loader gets can be handed to a new process, as on macOS and Windows, where
nothing is forked."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from attached import attach
from example.data.synthetic import SyntheticImages
from PIL import Image

from lightbase.data.images import ImageFolder
from lightbase.data.module import BaseDataModule


@pytest.mark.parametrize("kind", ["images", "folder"])
def test_a_dataset_survives_pickling(tmp_path: Path, kind: str) -> None:
    data: BaseDataModule = SyntheticImages(num_train=100, num_test=20, num_workers=1)
    if kind == "folder":
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            for i in range(10):
                Image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
        data = ImageFolder(data_dir=str(tmp_path), num_workers=1, batch_size=4)
    loader = attach(data).train_dataloader()
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump((loader.dataset, loader.collate_fn, loader.worker_init_fn))
    dataset = pickle.loads(buffer.getvalue())[0]
    indices = [3, 5]
    assert torch.equal(dataset.__getitems__(indices)[0], loader.dataset.__getitems__(indices)[0])
