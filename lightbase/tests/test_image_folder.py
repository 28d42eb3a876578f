import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attached import attach, read
from paths import TINY
from PIL import Image

from lightbase.commands.train import main
from lightbase.core.errors import UserError
from lightbase.core.images import read_image
from lightbase.extras.image_folder import ImageFolder


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Photographs of three classes in JPEG and PNG, 60 for training and 15 for the
    test, told apart by their colour."""
    tmp_path /= "photos"
    rng = np.random.default_rng(0)
    for split, num in (("train", 20), ("test", 5)):
        for label, name in enumerate(("blue", "green", "red")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(num):
                pixels = rng.integers(0, 100, (40, 50, 3), dtype=np.uint8)
                pixels[:, :, 2 - label] += 150
                Image.fromarray(pixels).save(
                    tmp_path / split / name / f"{i}.{'jpg' if i % 2 else 'png'}"
                )
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_folder_is_read_while_training(
    image_folder: Path, num_workers: int
) -> None:
    options: Any = {"image_shape": (3, 16, 16), "batch_size": 7, "drop_last": False}
    data = ImageFolder(str(image_folder), num_workers=num_workers, **options)
    assert split_sizes(data) == {"train": 54, "val": 6, "test": 15}
    assert data.classes == ["blue", "green", "red"]
    for loader in (
        data.train_dataloader(),
        data.val_dataloader(),
        data.test_dataloader(),
    ):
        images, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert images.dtype == torch.uint8
        assert images.shape == (len(loader.dataset), 3, 16, 16)
        # of red, green and blue
        assert torch.equal(images.float().mean((2, 3)).argmax(1), 2 - targets)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_cut_short", [True, False])
def test_a_broken_image_ends_the_training_with_its_name(
    image_folder, num_workers, is_cut_short
):
    broken = image_folder / "train" / "red" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200] if is_cut_short else b"no image")
    options: Any = {"batch_size": 60, "num_workers": num_workers, "val_fraction": 0}
    data = attach(ImageFolder(str(image_folder), **options), "fit")
    with pytest.raises(UserError) as caught:
        read(data.train_dataloader())
    pattern = f"{broken} cannot be read: .*; mend, shrink or remove it"
    assert re.fullmatch(pattern, str(caught.value))


def split_sizes(data: ImageFolder) -> dict[str, int]:
    attach(data, "fit").setup("test")
    return {name: len(split) for name, split in data.splits.items()}


@pytest.mark.parametrize(
    "names", [("Train", "valid", "TEST"), ("training", "val", "Testing")]
)
def test_an_own_validation_folder_and_any_case(image_folder, capsys, names):
    (image_folder / "train").rename(image_folder / "moved")
    (image_folder / "moved").rename(image_folder / names[0])
    shutil.copytree(image_folder / "test", image_folder / "other")
    (image_folder / "test").rename(image_folder / names[1])
    (image_folder / "other").rename(image_folder / names[2])
    (image_folder / names[1] / "red" / "0.png").unlink()
    data = ImageFolder(str(image_folder), image_shape=(3, 16, 16), num_workers=0)
    assert split_sizes(data) == {"train": 60, "val": 14, "test": 15}
    line = f"validation on {image_folder / names[1]}; data.val_fraction has no effect"
    assert line in capsys.readouterr().out


def test_what_is_no_image_of_a_class_is_left_out(image_folder):
    red = image_folder / "train" / "red"
    for folder in (
        image_folder / "dev",
        image_folder / "training",
        image_folder / "train/empty",
    ):
        folder.mkdir()
    for folder in (image_folder / "train", red):
        (folder / ".ipynb_checkpoints").mkdir()
        shutil.copy(red / "0.png", folder / ".ipynb_checkpoints" / "0-checkpoint.png")
    (red / "._1.jpg").write_bytes(b"of macOS")
    (red / "x.svg").write_text("<svg/>")
    (red / "dangling.png").symlink_to(red / "none.png")
    os.mkfifo(red / "pipe.jpg")  # waits for ever for a writer
    data = ImageFolder(str(image_folder), num_workers=0)
    assert split_sizes(data) == {"train": 54, "val": 6, "test": 15}
    assert data.classes == ["blue", "green", "red"]


def test_a_file_of_another_format_is_not_opened_whatever_its_name(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "x.eps")  # Pillow reads it by Ghostscript
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    with pytest.raises(UserError, match="not an image"):
        read_image(tmp_path / "x.png", (3, 9, 9))


def test_images_of_other_than_one_or_three_channels_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(
            [
                "--config",
                str(TINY),
                "--data=lightbase.ImageFolder",
                "--data.image_shape=[4,8,8]",
            ]
        )
    assert "data.image_shape: " in capsys.readouterr().err


def test_the_test_part_of_a_flat_folder_is_the_same_for_any_split_seed(
    image_folder, capsys
):
    def test_files(seed: int) -> set[Path]:
        data = ImageFolder(str(image_folder / "train"), split_seed=seed)
        assert split_sizes(data) == {"train": 43, "val": 5, "test": 12}
        train, test = ({*data.load(split).files} for split in ("train", "test"))
        assert len(train) == 48
        assert not train & test
        assert sorted(file.parent.name for file in test) == sorted(
            ["blue", "green", "red"] * 4
        )
        return test

    assert test_files(0) == test_files(1)
    assert "a fifth of each class is the test\n" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["nowhere", ".", "train/a"])
def test_an_image_folder_without_images(tmp_path: Path, folder: str) -> None:
    (tmp_path / "data" / folder).mkdir(parents=True)
    data = ImageFolder(
        str(tmp_path / "none" if folder == "nowhere" else tmp_path / "data")
    )
    with pytest.raises(UserError, match="no image in train/CLASS/, nor CLASS/"):
        assert data.classes


@pytest.mark.parametrize("split", ["test", "val"])
def test_classes_of_a_test_folder_must_be_those_of_the_training(image_folder, split):
    shutil.copytree(image_folder / "train" / "red", image_folder / split / "yellow")
    with pytest.raises(
        UserError, match=f"{split} has a class that the training had not: yellow"
    ):
        ImageFolder(str(image_folder)).load(split)


def test_a_checkpoint_of_other_classes_is_refused_and_its_own_serve_a_folder_of_less(
    image_folder,
):
    data = attach(ImageFolder(str(image_folder)))
    state = data.state_dict()
    shutil.copytree(image_folder / "train" / "red", image_folder / "train" / "amber")
    with pytest.raises(
        UserError, match="3 classes: blue, green, red\nthe data has others: amber, b"
    ):
        attach(ImageFolder(str(image_folder))).load_state_dict(state)
    shutil.rmtree(image_folder / "train")
    shutil.rmtree(image_folder / "test" / "blue")
    other = ImageFolder(str(image_folder))
    other.load_state_dict(state)
    attach(other, "test")
    assert sorted({*other.load("test").targets}) == [1, 2]
