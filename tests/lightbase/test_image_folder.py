import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attached import attach, read
from paths import TINY, script
from PIL import Image

from lightbase.data.images import ImageFolder
from lightbase.errors import UserError
from lightbase.run.train import main

evaluate = script("evaluate").main


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Photographs of three classes in JPEG and PNG, 60 for training and 15 for the test, told apart
    by their colour."""
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
def test_an_image_folder_is_read_while_training(image_folder: Path, num_workers: int) -> None:
    options: Any = {"image_shape": (3, 16, 16), "batch_size": 7, "drop_last": False}
    options["num_workers"] = num_workers
    data = ImageFolder(str(image_folder), **options)
    assert split_sizes(data) == {"train": 54, "val": 6, "test": 15}
    assert data.classes == ["blue", "green", "red"]
    for loader, num in (
        (data.train_dataloader(), 54),
        (data.val_dataloader(), 6),
        (data.test_dataloader(), 15),
    ):
        batches = list(loader)
        images, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert images.shape == (num, 3, 16, 16)
        assert images.dtype == torch.uint8
        assert torch.equal(
            images.float().mean((2, 3)).argmax(1), 2 - targets
        )  # of red, green and blue


def cut_short(image: Path, num_bytes: int) -> None:
    image.write_bytes(image.read_bytes()[:num_bytes])


def test_an_image_that_breaks_while_training_is_named(image_folder: Path) -> None:
    broken = image_folder / "train" / "red" / "3.jpg"
    for num_workers in (0, 1):
        options: Any = {"batch_size": 60, "num_workers": num_workers, "val_fraction": 0}
        data = attach(ImageFolder(str(image_folder), **options), "fit")
        cut_short(broken, 200)
        with pytest.raises(UserError) as caught:
            read(data.train_dataloader())
        assert f"{broken} cannot be read: " in str(caught.value)
        broken.write_bytes((broken.parent / "1.jpg").read_bytes())


@pytest.mark.parametrize("num_bytes", [0, 10, 900])  # of nothing, of the header, of the pixels
@pytest.mark.parametrize("name", ["train/red/3.jpg", "train/red/4.png", "test/blue/1.jpg"])
def test_a_broken_image_is_found_before_the_training(image_folder, name, num_bytes):
    cut_short(image_folder / name, num_bytes)
    (image_folder / "train" / "green" / "1.jpg").write_text("no image")
    with pytest.raises(
        UserError, match=r"cannot be read: .*; so are 1 more\nmend or remove"
    ) as caught:
        ImageFolder(str(image_folder)).prepare_data()
    assert len(str(caught.value).splitlines()) == 2
    (image_folder / "train" / "green" / "1.jpg").unlink()
    with pytest.raises(UserError) as caught:
        ImageFolder(str(image_folder)).prepare_data()
    assert str(caught.value).startswith(f"{image_folder / name} cannot be read: ")


def test_whole_images_with_bytes_behind_them_and_of_other_formats_are_sound(image_folder):
    photo = image_folder / "train" / "red" / "3.jpg"
    photo.write_bytes(photo.read_bytes() + b"trailer of a phone" * 10)
    Image.new("RGB", (9, 9)).save(image_folder / "train" / "red" / "x.webp")
    Image.new("RGB", (9, 9)).save(image_folder / "train" / "red" / "x.bmp")
    ImageFolder(str(image_folder)).prepare_data()
    cut_short(image_folder / "train" / "red" / "x.bmp", 100)
    with pytest.raises(UserError, match=r"x\.bmp cannot be read"):
        ImageFolder(str(image_folder)).prepare_data()


def test_each_start_checks_all_images_and_leaves_nothing_behind(image_folder: Path) -> None:
    before = sorted(image_folder.rglob("*"))
    for _ in range(2):
        ImageFolder(str(image_folder)).prepare_data()
    assert sorted(image_folder.rglob("*")) == before
    photo = image_folder / "train" / "red" / "3.jpg"
    content, times = photo.read_bytes(), photo.stat()
    photo.write_bytes(content[:200] + bytes(len(content) - 200))  # as long as before, and as old
    os.utime(photo, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match=r"3\.jpg cannot be read"):
        ImageFolder(str(image_folder)).prepare_data()


def split_sizes(data: ImageFolder) -> dict[str, int]:
    attach(data, "fit").setup("test")
    return {name: len(split) for name, split in data.splits.items()}


@pytest.mark.parametrize(
    "names",
    [("Train", "valid", "TEST"), ("training", "Validation", "test"), ("train", "val", "Testing")],
)
def test_an_own_validation_folder_and_any_case(image_folder, capsys, names):
    (image_folder / "train").rename(image_folder / "moved")
    (image_folder / "moved").rename(image_folder / names[0])
    (image_folder / "test").rename(image_folder / "moved")
    shutil.copytree(image_folder / "moved", image_folder / names[1])
    (image_folder / names[1] / "red" / "0.png").unlink()
    (image_folder / "moved").rename(image_folder / names[2])
    data = ImageFolder(str(image_folder), image_shape=(3, 16, 16), num_workers=0)
    assert split_sizes(data) == {"train": 60, "val": 14, "test": 15}
    said = capsys.readouterr().out
    assert f"validation on {image_folder / names[1]}; data.val_fraction has no effect" in said
    images, targets = next(iter(data.val_dataloader()))
    assert torch.equal(images.float().mean((2, 3)).argmax(1), 2 - targets)


def test_folders_that_are_not_used_and_classes_without_images_are_reported(image_folder, capsys):
    (image_folder / "dev").mkdir()
    (image_folder / "training").mkdir()  # a second one
    (image_folder / "train" / "empty").mkdir()
    shutil.rmtree(image_folder / "test" / "green")
    data = ImageFolder(str(image_folder))
    data.prepare_data()
    assert capsys.readouterr().out.splitlines() == [
        "Images: not used, neither train, val nor test: dev, training",
        "Images: test has none of green",
        "Images: train has none of empty",
    ]
    assert data.classes == ["blue", "green", "red"]


@pytest.mark.parametrize("data", ["ImageFolder", "TorchvisionSet"])
def test_images_of_other_than_one_or_three_channels_are_refused(data, capsys):
    with pytest.raises(SystemExit):
        main(["--config", str(TINY), f"--data=lightbase.{data}", "--data.image_shape=[4,8,8]"])
    assert "data.image_shape: " in capsys.readouterr().err


def test_one_flat_folder_of_classes_is_split_by_seed(image_folder, capsys):
    def test_files(seed: int) -> set[Path]:
        data = ImageFolder(str(image_folder / "train"), split_seed=seed)
        assert split_sizes(data) == {"train": 43, "val": 5, "test": 12}
        train, test = ({file for file, _ in data.load(split).source} for split in ("train", "test"))
        assert len(train) == 48
        assert not train & test
        assert sorted(file.parent.name for file in test) == sorted(["blue", "green", "red"] * 4)
        return test

    assert test_files(0) == test_files(0) != test_files(1)
    assert "a fifth of each class is the test\n" in capsys.readouterr().out


def test_without_a_test_folder_nothing_is_tested_and_a_line_says_so(
    image_folder, train, capsys, tmp_path
):
    shutil.rmtree(image_folder / "test")
    shutil.copytree(image_folder / "train" / "red", image_folder / "test")  # without labels
    data = ["--data", "lightbase.ImageFolder", "--data.data_dir", image_folder]
    data += ["--data.num_workers", 0, "--data.image_shape", "[3,8,8]"]
    metrics = train(*data, "--model.net.sizes", "[192,3]")
    assert not any(key.startswith("test/") for key in metrics)
    said = capsys.readouterr()
    assert said.out.count(f"Images: no test/CLASS/ in {image_folder}: nothing is tested") == 1
    assert "across ranks is zero" not in said.err
    with pytest.raises(SystemExit) as caught:
        evaluate(
            ["--ckpt_path", str(tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt")]
        )
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("error: No test: the data has no batch")


def test_hidden_folders_and_files_are_left_out(image_folder: Path) -> None:
    for folder in (image_folder / "train", image_folder / "train" / "red", image_folder / "test"):
        (folder / ".ipynb_checkpoints").mkdir()
        shutil.copy(
            image_folder / "train" / "red" / "0.png",
            folder / ".ipynb_checkpoints" / "0-checkpoint.png",
        )
    (image_folder / "train" / "red" / "._1.jpg").write_bytes(b"of macOS")
    data = ImageFolder(str(image_folder))
    assert split_sizes(data) == {"train": 54, "val": 6, "test": 15}
    assert data.classes == ["blue", "green", "red"]


def test_an_image_folder_without_images(tmp_path: Path) -> None:
    for folder in ("nowhere", ".", "train", "train/a"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True) if folder != "nowhere" else None
        with pytest.raises(
            UserError, match="there is no train/CLASS/ with images in it, nor CLASS/"
        ):
            ImageFolder(
                str(tmp_path / "nowhere" if folder == "nowhere" else tmp_path)
            ).prepare_data()


@pytest.mark.parametrize("split", ["test", "val"])
def test_classes_of_a_test_folder_must_be_those_of_the_training(image_folder, split):
    shutil.copytree(image_folder / "train" / "red", image_folder / split / "yellow")
    with pytest.raises(UserError, match=f"{split} has classes that the training had not: yellow"):
        ImageFolder(str(image_folder)).prepare_data()


def test_a_checkpoint_of_other_classes_is_refused_and_its_own_serve_a_folder_of_less(image_folder):
    data = attach(ImageFolder(str(image_folder)))
    state = data.state_dict()
    shutil.copytree(image_folder / "train" / "red", image_folder / "train" / "amber")
    with pytest.raises(
        UserError,
        match="trained on 3 classes, blue, green, red\nthe data has 4, amber, blue, green, red",
    ):
        attach(ImageFolder(str(image_folder))).load_state_dict(state)
    shutil.rmtree(image_folder / "train")
    shutil.rmtree(image_folder / "test" / "blue")
    other = ImageFolder(str(image_folder))
    other.load_state_dict(state)
    attach(other, "test")
    assert sorted({target for _, target in other.load("test").source}) == [1, 2]
