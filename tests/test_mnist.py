import gzip
from pathlib import Path

import pytest
import torch
from torchvision import datasets
from torchvision.transforms import v2

from lightbase import UserError

module = pytest.importorskip("project.data.mnist")
MNIST, FILES = module.MNIST, module.FILES


def test_mnist_equals_torchvisions_own_pipeline(mnist_dir: Path) -> None:
    data = MNIST(data_dir=str(mnist_dir))
    inputs, targets = data.load("test")
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5], [0.5]),
        ]
    )
    reference = datasets.MNIST(mnist_dir, train=False, transform=transform)
    expected = torch.stack([image for image, _ in reference])
    torch.testing.assert_close(data.normalize(inputs), expected)
    assert targets.tolist() == [label for _, label in reference]


@pytest.mark.parametrize("how", ["cut", "empty", "long"])
def test_a_damaged_file_is_named(mnist_dir: Path, how: str) -> None:
    file = mnist_dir / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-7], "empty": b"", "long": content + b"x"}[how])
    with pytest.raises(
        UserError, match=r"MNIST (is not in .*, or damaged|cannot be read)"
    ):
        MNIST(data_dir=str(mnist_dir)).load("train")


@pytest.mark.usefixtures("offline")
def test_an_mnist_file_of_the_published_size_must_have_the_published_content(
    mnist_dir: Path,
) -> None:
    name = "MNIST/raw/t10k-labels-idx1-ubyte"
    file, (size, _) = mnist_dir / name, FILES[name]
    file.write_bytes(
        bytes.fromhex("00000801") + (size - 8).to_bytes(4, "big") + bytes(size - 8)
    )
    with pytest.raises(UserError, match=file.name):
        MNIST(data_dir=str(mnist_dir)).load("test")


@pytest.mark.usefixtures("offline")
def test_without_a_network_the_message_says_which_file_goes_where(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz") as caught:
        MNIST(data_dir=str(tmp_path)).load("train")
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.usefixtures("offline")
def test_packed_mnist_files_put_by_hand_are_unpacked(
    mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (mnist_dir / name for name in FILES):
        file.with_suffix(".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    resources = [(f"{Path(name).name}.gz", None) for name in FILES]  # no checksums
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    assert len(MNIST(data_dir=str(mnist_dir)).load("train")[0]) == 300
