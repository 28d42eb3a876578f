import gzip
from pathlib import Path

import pytest
import torch
from attached import attach, refuse_network
from torchvision import datasets
from torchvision.transforms import v2

from lightbase.core.errors import UserError

module = pytest.importorskip("project.data.mnist")
FILES, MNIST = module.FILES, module.MNIST


def test_mnist_equals_torchvisions_own_pipeline(mnist_dir: Path) -> None:
    data = attach(MNIST(data_dir=str(mnist_dir), val_fraction=0), "test")
    inputs, targets = next(iter(data.test_dataloader()))
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5], [0.5]),
        ]
    )
    reference = datasets.MNIST(mnist_dir, train=False, transform=transform)
    torch.testing.assert_close(
        data.normalize(inputs).cpu(), torch.stack([reference[i][0] for i in range(64)])
    )
    assert targets.tolist() == [reference[i][1] for i in range(64)]


@pytest.mark.parametrize("how", ["cut", "empty", "long"])
def test_a_damaged_file_is_named(mnist_dir: Path, how: str) -> None:
    file = mnist_dir / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-7], "empty": b"", "long": content + b"x"}[how])
    with pytest.raises(
        UserError, match=r"MNIST (is not in .*, or damaged|cannot be read)"
    ):
        MNIST(data_dir=str(mnist_dir)).load("train")


def test_an_mnist_file_of_the_published_size_must_have_the_published_content(mnist_dir):
    name = "MNIST/raw/t10k-labels-idx1-ubyte"
    file, (size, _) = mnist_dir / name, FILES[name]
    file.write_bytes(
        bytes.fromhex("00000801") + (size - 8).to_bytes(4, "big") + bytes(size - 8)
    )
    with pytest.raises(UserError, match=file.name):
        MNIST(data_dir=str(mnist_dir)).load("test")


def test_without_a_network_the_message_says_which_file_goes_where(
    tmp_path, monkeypatch
):
    refuse_network(monkeypatch)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz") as caught:
        MNIST(data_dir=str(tmp_path)).load("train")
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_packed_mnist_files_put_by_hand_are_unpacked(mnist_dir, monkeypatch):
    refuse_network(monkeypatch)
    for file in (mnist_dir / name for name in FILES):
        file.with_suffix(".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    resources = [(f"{Path(name).name}.gz", None) for name in FILES]  # no checksums
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    assert len(MNIST(data_dir=str(mnist_dir)).load("train")[0]) == 300
