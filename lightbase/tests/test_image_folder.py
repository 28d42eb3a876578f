import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attached import attach, read
from PIL import Image

from lightbase.config.errors import UserError
from lightbase.data.image_folder import ImageFolder
from lightbase.data.tensors import read_image


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of three classes in JPEG and PNG, 60 for training and 15 for the test."""
    for split, num in (("train", 20), ("test", 5)):
        for name in ("red", "green", "blue"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(num):
                image = Image.new("RGB", (25, 20), name)
                image.save(folder / f"{i}.{['png', 'jpg'][i % 2]}")
    return tmp_path / "photos"


def attached(folder: Path, **options: Any) -> ImageFolder:
    data = attach(ImageFolder(str(folder), **{"num_workers": 0, **options}))
    data.setup("test")
    return data


def sizes(data: ImageFolder) -> list[int]:
    return [len(data.splits[name]) for name in ("train", "val", "test")]


def test_an_image_folder_is_read_while_training(photos):
    data = attached(photos, image_shape=(3, 16, 16), drop_last=False)
    assert sizes(data) == [54, 6, 15]
    assert data.classes == ["blue", "green", "red"]
    for loader in (data.train_dataloader(), data.test_dataloader()):
        ((images, targets),) = loader
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, 16, 16)
        # of red, green and blue
        assert torch.equal(images.float().mean((2, 3)).argmax(1), 2 - targets)


@pytest.mark.parametrize(("num_workers", "num_bytes"), [(0, 200), (1, 0)])
def test_a_broken_image_ends_the_training_with_its_name(photos, num_workers, num_bytes):
    broken = photos / "train" / "red" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:num_bytes])
    data = attached(photos, batch_size=54, num_workers=num_workers)
    message = f"^{broken} cannot be read: .*; mend, shrink or remove it$"
    with pytest.raises(UserError, match=message):
        read(data.train_dataloader())


def test_what_is_no_image_of_a_class_is_left_out(photos, capsys):
    red = photos / "train" / "red"
    for folder in ("dev", "train/empty"):
        (photos / folder).mkdir()
    for folder in (photos / "train", red):
        shutil.copytree(photos / "test", folder / ".ipynb_checkpoints")
    (red / "._1.jpg").write_bytes(b"of macOS")
    (red / "x.svg").write_text("<svg/>")
    (red / "dangling.png").symlink_to(red / "none.png")
    os.mkfifo(red / "pipe.jpg")  # waits for ever for a writer
    data = attached(photos)
    assert sizes(data) == [54, 6, 15]
    assert data.classes == ["blue", "green", "red"]
    assert "Images: 3 files in train/ are left out" in capsys.readouterr().out


def test_each_file_is_read_once_whatever_its_paths(photos, capsys):
    red = photos / "train" / "red"
    (red / "again").symlink_to(red)  # a folder below a class is not followed
    for i in (0, 2):
        (photos / "test" / "red" / f"link{i}.png").symlink_to(red / f"{i}.png")
    os.link(red / "4.png", photos / "test" / "red" / "link4.png")
    data = attached(photos)
    assert sizes(data) == [51, 6, 18]
    # those of the test set
    assert "Images: 3 files in train/ are left out" in capsys.readouterr().out


def test_a_file_of_another_format_is_not_opened_whatever_its_name(tmp_path):
    file = tmp_path / "x.png"
    Image.new("RGB", (9, 9)).save(file, "EPS")  # Pillow reads it by Ghostscript
    with pytest.raises(UserError, match="cannot identify"):
        read_image(file, (3, 9, 9))


def test_a_flat_folder_has_the_same_test_part_for_any_split_seed(photos, capsys):
    tested = []
    for seed in (0, 1):
        data = attached(photos / "train", split_seed=seed)
        assert sizes(data) == [43, 5, 12]
        assert data.load("test").targets == [0] * 4 + [1] * 4 + [2] * 4
        tested.append(set(data.load("test").files))
        assert tested[0].isdisjoint(data.load("train").files)
    assert tested[0] == tested[1]
    assert "a fifth of each class is the test\n" in capsys.readouterr().out
    folds = attached(photos / "train", num_folds=3, fold=0)  # the fold is the test set
    assert sizes(folds) == [36, 4, 20]


def test_the_classes_of_a_folder_must_be_those_of_the_training(photos):
    state = attached(photos).state_dict()
    shutil.copytree(photos / "train" / "red", photos / "test" / "yellow")
    with pytest.raises(UserError, match="test has a class that the training had not: "):
        ImageFolder(str(photos)).load("test")
    (photos / "test" / "yellow").rename(photos / "train" / "amber")
    message = "the classes blue, green, red\nthe data has others: amber, b"
    with pytest.raises(UserError, match=message):
        attached(photos).load_state_dict(state)
    # the classes of the checkpoint serve a folder of fewer
    shutil.rmtree(photos / "test" / "blue")
    other = ImageFolder(str(photos))
    other.load_state_dict(state)
    assert {*other.load("test").targets} == {1, 2}
