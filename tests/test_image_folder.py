from pathlib import Path

import numpy as np
import pytest
import torch
from attached import attach
from PIL import Image

from project.base.errors import UserError
from project.data.image_folder import ImageFolder


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Photographs of three classes in JPEG and PNG, 60 for training and 15 for the test, told apart by their colour."""
    rng = np.random.default_rng(0)
    for split, num in (("train", 20), ("test", 5)):
        for label, name in enumerate(("blue", "green", "red")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(num):
                pixels = rng.integers(0, 100, (40, 50, 3), dtype=np.uint8)
                pixels[:, :, 2 - label] += 150
                Image.fromarray(pixels).save(tmp_path / split / name / f"{i}.{'jpg' if i % 2 else 'png'}")
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_folder_is_read_while_training(image_folder: Path, num_workers: int) -> None:
    options = {"image_shape": (3, 16, 16), "batch_size": 7, "drop_last": False, "num_workers": num_workers}
    data = attach(ImageFolder(str(image_folder), **options), "fit")
    data.setup("test")
    assert data.num_classes == 3
    assert data.classes == ["blue", "green", "red"]
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 54, "val": 6, "test": 15}
    for loader, num in ((data.train_dataloader(), 54), (data.val_dataloader(), 6), (data.test_dataloader(), 15)):
        batches = list(loader)
        images, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert images.shape == (num, 3, 16, 16)
        assert images.dtype == torch.uint8
        assert torch.equal(images.float().mean((2, 3)).argmax(1), 2 - targets)  # of red, green and blue


def test_a_damaged_image_is_named(image_folder: Path) -> None:
    broken = image_folder / "train" / "red" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    for num_workers in (0, 1):
        options = {"image_shape": (3, 16, 16), "batch_size": 60, "num_workers": num_workers, "val_fraction": 0}
        data = attach(ImageFolder(str(image_folder), **options), "fit")
        with pytest.raises(UserError) as caught:
            list(data.train_dataloader())
        assert str(caught.value).startswith(f"{broken} cannot be read: ")
        assert len(str(caught.value).splitlines()) == 1


def test_an_image_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no train/CLASS/"):
        ImageFolder(str(tmp_path)).setup("fit")
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="the train set of ImageFolder is empty"):
        ImageFolder(str(tmp_path)).setup("fit")


def test_classes_of_a_test_folder_must_be_those_of_the_training(image_folder: Path) -> None:
    (image_folder / "test" / "yellow").mkdir()
    with pytest.raises(UserError, match="yellow"):
        ImageFolder(str(image_folder)).setup("test")
