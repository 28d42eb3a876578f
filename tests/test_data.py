import gzip
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.data.cifar10 import CIFAR10
from project.data.features import Features
from project.data.image_folder import ImageFolder
from project.data.mnist import FILES, MNIST
from project.data.synthetic import SyntheticImages


def attach(data: TensorDataModule, stage: str = "fit", **trainer: Any) -> TensorDataModule:
    """The data module as the Trainer has it when it asks for loaders."""
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1, **trainer)
    data.prepare_data()
    data.setup(stage)
    return data


def labelled(num: int, batch_size: int = 10, **options: Any) -> TensorDataModule:
    """Data whose inputs are their own indices."""

    class Labelled(TensorDataModule):
        classes = ["a", "b"]

        def load(self, split: str) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            start = 0 if split == "train" else 1000
            return torch.arange(start, start + num), torch.zeros(num, dtype=torch.int64)

    return attach(Labelled(batch_size=batch_size, **options))


def samples(loader: Any) -> list[int]:
    return torch.cat([inputs for inputs, _ in loader]).tolist()


def test_training_and_validation_share_the_training_set_and_the_split_is_seeded() -> None:
    data = labelled(200)
    train, val = data.splits["train"].inputs.tolist(), data.splits["val"].inputs.tolist()
    assert len(val) == 20
    assert sorted(train + val) == list(range(200))
    assert labelled(200).splits["val"].inputs.tolist() == val
    assert labelled(200, split_seed=1).splits["val"].inputs.tolist() != val


def test_without_validation_all_trains_and_the_curve_is_of_the_test_set() -> None:
    data = labelled(50, val_fraction=0)
    assert len(data.splits["train"]) == 50
    assert samples(data.val_dataloader()) == list(range(1000, 1050))


def test_each_epoch_has_another_order_and_drops_the_partial_batch() -> None:
    torch.manual_seed(0)
    data = labelled(115, val_fraction=0)
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(0)
    first = samples(loader)
    assert len(first) == 110
    assert set(first) < set(range(115))
    loader.batch_sampler.set_epoch(1)
    assert samples(loader) != first
    loader.batch_sampler.set_epoch(0)
    assert samples(loader) == first
    kept = labelled(115, val_fraction=0, drop_last=False).train_dataloader()
    assert sorted(samples(kept)) == list(range(115))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_is_in_order_and_whole_also_with_workers(num_workers: int) -> None:
    data = labelled(37, num_workers=num_workers, val_fraction=0)
    assert samples(data.test_dataloader()) == list(range(1000, 1037))
    loader = data.test_dataloader()
    assert loader.num_workers == num_workers
    assert loader.persistent_workers == (num_workers > 0)


def test_a_loader_goes_on_in_the_middle_of_an_epoch() -> None:
    data = labelled(100, val_fraction=0)
    loader = data.train_dataloader()
    whole = [inputs.tolist() for inputs, _ in loader]
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    resumed = data.train_dataloader()
    resumed.load_state_dict(state)
    assert [inputs.tolist() for inputs, _ in resumed] == whole[4:]
    later = data.train_dataloader()
    later.batch_sampler.set_epoch(1)
    later.load_state_dict(state)  # of another epoch: from the start
    assert len(list(later)) == len(whole)


def test_pinned_memory_is_off_on_the_cpu_and_as_asked_otherwise() -> None:
    assert not labelled(50).val_dataloader().pin_memory
    assert labelled(50, pin_memory=True).val_dataloader().pin_memory


@pytest.mark.gpu
def test_pinned_memory_is_on_when_a_gpu_is_used() -> None:
    data = SyntheticImages(num_train=100, num_test=50, resident=False)
    data.trainer = Trainer(accelerator="gpu", devices=1, logger=False, enable_checkpointing=False)
    data.setup("fit")
    inputs, _ = next(iter(data.val_dataloader()))
    assert inputs.is_pinned()


@pytest.mark.gpu
def test_small_data_is_resident_on_the_gpu() -> None:
    found = []
    for options in ({}, {"resident": True}, {"resident": False}, {"num_workers": 1}):
        data = SyntheticImages(num_train=100, num_test=50, **options)
        data.trainer = Trainer(accelerator="gpu", devices=1, logger=False, enable_checkpointing=False)
        data.setup("fit")
        batches = list(data.train_dataloader())
        assert data.train_dataloader().dataset is data.train_dataloader().dataset  # one copy
        found.append((batches[0][0].device.type, [labels.tolist() for _, labels in batches]))
    assert [kind for kind, _ in found] == ["cuda", "cuda", "cpu", "cpu"]
    assert all(order == found[0][1] for _, order in found)


@pytest.mark.parametrize("options", [{}, {"resident": True}])
def test_without_a_gpu_data_stays_where_it_is(options: dict[str, Any]) -> None:
    data = labelled(50, **options)
    assert data.val_dataloader().dataset is data.splits["val"]
    assert not data.on_gpu


@pytest.mark.parametrize("options", [{"val_fraction": 0.001}, {"val_fraction": 0.99, "batch_size": 2}])
def test_impossible_splits(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"val_fraction|batch_size"):
        labelled(50, **options)


def test_images_stay_bytes_until_they_are_on_the_device() -> None:
    data = attach(SyntheticImages(num_train=100, num_test=50, val_fraction=0))
    inputs, labels = next(iter(data.train_dataloader()))
    assert inputs.dtype == torch.uint8
    moved, _ = data.on_after_batch_transfer((inputs, labels), 0)
    assert moved.dtype == torch.float32


def test_mnist_equals_torchvisions_own_pipeline(mnist_dir: Path) -> None:
    data = attach(MNIST(data_dir=str(mnist_dir), val_fraction=0), "test")
    inputs, labels = next(iter(data.test_dataloader()))
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])])
    reference = datasets.MNIST(mnist_dir, train=False, transform=transform)
    torch.testing.assert_close(data.normalize(inputs), torch.stack([reference[i][0] for i in range(64)]))
    assert labels.tolist() == [reference[i][1] for i in range(64)]


def test_cifar10_equals_torchvisions_own_pipeline(cifar10_dir: Path) -> None:
    data = attach(CIFAR10(data_dir=str(cifar10_dir)), "test")
    inputs, labels = next(iter(data.test_dataloader()))
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    reference = datasets.CIFAR10(cifar10_dir, train=False, transform=transform)
    torch.testing.assert_close(data.normalize(inputs), torch.stack([reference[i][0] for i in range(64)]))
    assert labels.tolist() == [reference[i][1] for i in range(64)]


def test_cifar10_augments_training_batches_only(cifar10_dir: Path) -> None:
    data = attach(CIFAR10(data_dir=str(cifar10_dir), random_crop=4, random_flip=True, val_fraction=0))
    batch = next(iter(data.train_dataloader()))
    data.trainer.training = True
    augmented, _ = data.on_after_batch_transfer(batch, 0)
    data.trainer.validating = True
    plain, _ = data.on_after_batch_transfer(batch, 0)
    assert augmented.shape == plain.shape
    assert not torch.equal(augmented, plain)
    torch.testing.assert_close(plain, batch[0].float() / 255)


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
    file.write_bytes({"cut": content[:-7], "empty": b"", "long": content + b"x", "flip": content}[how])


@pytest.mark.parametrize("how", ["cut", "empty", "long"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_damaged_mnist_file_is_named(mnist_dir: Path, name: str, how: str) -> None:
    damage(mnist_dir / "MNIST" / "raw" / name, how)
    with pytest.raises(UserError, match=name):
        MNIST(data_dir=str(mnist_dir)).prepare_data()


def test_an_mnist_file_of_the_published_size_must_have_the_published_content(mnist_dir: Path) -> None:
    file = mnist_dir / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    size, _ = FILES[file.name]
    file.write_bytes(bytes.fromhex("00000801") + (size - 8).to_bytes(4, "big") + bytes(size - 8))
    with pytest.raises(UserError, match=file.name):
        MNIST(data_dir=str(mnist_dir)).prepare_data()


@pytest.mark.parametrize("how", ["cut", "empty", "flip"])
def test_a_damaged_cifar10_file_is_named(cifar10_dir: Path, how: str) -> None:
    damage(cifar10_dir / "cifar-10-batches-py" / "data_batch_3", how)
    with pytest.raises(UserError, match="data_batch_3"):
        CIFAR10(data_dir=str(cifar10_dir)).prepare_data()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("data", "file"), [(MNIST, "train-images-idx3-ubyte.gz"), (CIFAR10, "cifar-10-python.tar.gz")])
def test_without_a_network_the_message_says_which_file_goes_where(data: type, file: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=file) as caught:
        data(data_dir=str(tmp_path)).prepare_data()
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.usefixtures("no_network")
def test_packed_mnist_files_put_by_hand_are_unpacked(mnist_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mnist_dir / "MNIST" / "raw"
    for name in FILES:
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    resources = [(f"{name}.gz", None) for name in FILES]  # no checksums of generated files
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    data = MNIST(data_dir=str(mnist_dir))
    data.prepare_data()
    assert len(data.load("train")[0]) == 300


def test_synthetic_images_are_seeded_and_quickly_made() -> None:
    start = time.perf_counter()
    images, labels = SyntheticImages().load("train")
    assert time.perf_counter() - start < 10  # about one second on two free cores
    assert images.shape == (20_000, 3, 32, 32)
    assert images.dtype == torch.uint8
    again, _ = SyntheticImages(num_train=20_000).load("train")
    assert torch.equal(images, again)
    assert labels.bincount().min() > 1_500
    other, _ = SyntheticImages(data_seed=1, num_train=100).load("train")
    assert not torch.equal(images[:100], other)
    test, _ = SyntheticImages(num_test=100).load("test")
    assert not torch.equal(images[:100], test)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (4, 9, 17)])
def test_synthetic_images_of_any_shape(shape: tuple[int, int, int]) -> None:
    images, labels = SyntheticImages(image_shape=shape, num_classes=3, num_train=30).load("train")
    assert images.shape == (30, *shape)
    assert set(labels.tolist()) == {0, 1, 2}


def test_generated_features_come_in_overlapping_clusters() -> None:
    data = attach(Features(), "fit")
    inputs, labels = data.splits["train"].inputs, data.splits["train"].labels
    assert inputs.shape[1] == 10
    centres = torch.stack([inputs[labels == c].mean(0) for c in (0, 1)])
    test_inputs, test_labels = data.load("test")
    found = torch.cdist(test_inputs, centres).argmin(1)
    accuracy = (found == test_labels).float().mean()
    assert 0.9 <= accuracy < 0.99
    normalised = data.normalize(inputs)
    torch.testing.assert_close(normalised.mean(0), torch.zeros(10), atol=1e-5, rtol=0)


def write_csv(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_features_from_a_csv_file(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'cat' if i % 2 else 'ant'},{-i}\n" for i in range(100))
    path = write_csv(tmp_path / "x.csv", "a,kind,b\n" + rows)
    data = Features(csv_path=path, label_column="kind", batch_size=4)
    attach(data, "fit")
    data.setup("test")
    assert data.classes == ["ant", "cat"]
    parts = [data.splits[name].inputs for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [72, 8, 20]
    whole = torch.cat(parts)
    assert sorted(whole[:, 0].tolist()) == list(range(100))
    assert torch.equal(whole[:, 0], -whole[:, 1])
    labels = torch.cat([data.splits[name].labels for name in ("train", "val", "test")])
    assert torch.equal(labels, whole[:, 0].long() % 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column"),
        ("a,label\n", "no rows"),
        ("a,b\n1,2\n", "label"),
        ("a,label\n1,x\noops,y\n", "line 3"),
        ("a,label\n1,x\n,y\n", "line 3"),
        ("a,label\n1,x\nnan,y\n", "line 3"),
        ("a,label\n1,x\n1e300,y\n", "line 3"),
        ("label\nx\n", "feature column"),
        ("a,a,label\n1,2,x\n", "once"),
        ("a,label\n1,x\n1\n", "line 3"),
        ("a,label\n1,x\n1,y,7\n", "line 3"),
    ],
)
def test_a_wrong_csv_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Features(csv_path=write_csv(tmp_path / "x.csv", text)).load("train")


def test_a_column_that_never_changes_tells_nothing(tmp_path: Path) -> None:
    rows = "".join(f"{i % 7},123456.789,{'ab'[i % 2]}\n" for i in range(300))
    data = attach(Features(csv_path=write_csv(tmp_path / "x.csv", "x,k,label\n" + rows), batch_size=4), "fit")
    normalised = data.normalize(data.splits["train"].inputs)
    assert normalised[:, 1].abs().max() < 0.1
    assert normalised[:, 0].std() == pytest.approx(1, rel=1e-3)


def test_another_file_keeps_the_classes_of_the_training(tmp_path: Path) -> None:
    trained = Features(csv_path=write_csv(tmp_path / "x.csv", "a,label\n" + "1,x\n2,y\n3,z\n" * 20), batch_size=4)
    attach(trained, "fit")
    other = Features(csv_path=write_csv(tmp_path / "yz.csv", "a,label\n" + "2,y\n3,z\n" * 20))
    other.load_state_dict(trained.state_dict())
    assert set(other.load("test")[1].tolist()) == {1, 2}
    unknown = Features(csv_path=write_csv(tmp_path / "w.csv", "a,label\n2,w\n"))
    unknown.load_state_dict(trained.state_dict())
    with pytest.raises(UserError, match="w"):
        unknown.load("test")


def test_too_few_samples_for_a_test_set_are_refused(tmp_path: Path) -> None:
    data = Features(csv_path=write_csv(tmp_path / "x.csv", "a,label\n1,x\n2,y\n"))
    with pytest.raises(UserError, match="test set of Features is empty"):
        data.setup("test")


def test_mnist_labels_and_images_must_be_as_many(mnist_dir: Path) -> None:
    file = mnist_dir / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    file.write_bytes(struct.pack(">2i", 0x801, 200) + bytes(200))
    data = MNIST(data_dir=str(mnist_dir))
    data.prepare_data()
    with pytest.raises(UserError, match="300 inputs and 200 labels"):
        data.setup("fit")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("data", [MNIST, CIFAR10])
def test_a_data_dir_that_is_a_file(data: type, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        data(data_dir=str(tmp_path / "file")).prepare_data()


def test_a_missing_csv_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv"):
        Features(csv_path=str(tmp_path / "none.csv")).load("train")


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
    assert data.classes == ["blue", "green", "red"]
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 54, "val": 6, "test": 15}
    for loader, num in ((data.train_dataloader(), 54), (data.val_dataloader(), 6), (data.test_dataloader(), 15)):
        batches = list(loader)
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert images.shape == (num, 3, 16, 16)
        assert images.dtype == torch.uint8
        assert torch.equal(images.float().mean((2, 3)).argmax(1), 2 - labels)  # of red, green and blue


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
