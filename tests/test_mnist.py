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
    to_float = v2.ToDtype(torch.float32, scale=True)
    transform = v2.Compose([v2.ToImage(), to_float, v2.Normalize([0.5], [0.5])])
    reference = datasets.MNIST(mnist_dir, train=False, transform=transform)
    expected, labels = zip(*reference, strict=True)
    torch.testing.assert_close(data.normalize(inputs), torch.stack(expected))
    assert targets.tolist() == list(labels)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("how", ["cut", "empty", "published size"])
def test_a_damaged_file_is_named(mnist_dir: Path, how: str) -> None:
    name = "MNIST/raw/train-labels-idx1-ubyte"
    file, (size, _) = mnist_dir / name, FILES[name]
    zeros = bytes.fromhex("00000801") + (size - 8).to_bytes(4, "big") + bytes(size - 8)
    contents = {"cut": file.read_bytes()[:-7], "empty": b"", "published size": zeros}
    file.write_bytes(contents[how])
    with pytest.raises(UserError, match=r"MNIST is not in|ubyte is damaged") as caught:
        MNIST(data_dir=str(mnist_dir)).load("train")
    assert "train-labels-idx1-ubyte" in str(caught.value)
    assert str(mnist_dir) in str(caught.value)
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
