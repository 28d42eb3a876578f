import pickle
from pathlib import Path

import pytest
import torch
from torchvision import datasets
from torchvision.transforms import v2

from lightbase import UserError

module = pytest.importorskip("project.data.cifar10")
CIFAR10 = module.CIFAR10


@pytest.fixture
def published(cifar10_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generated files count as the published ones."""
    folder = cifar10_dir / "cifar-10-batches-py"
    sizes = {
        split: {name: (folder / name).stat().st_size for name in names}
        for split, names in module.SIZES.items()
    }
    monkeypatch.setattr(module, "SIZES", sizes)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("packed_anew", [False, True])
def test_cifar10_equals_torchvisions_own_pipeline(
    cifar10_dir, packed_anew, capsys, monkeypatch
):
    if packed_anew:  # one file is enough
        monkeypatch.setitem(module.SIZES["test"], "test_batch", 31_035_526)
    data = CIFAR10(data_dir=str(cifar10_dir))
    inputs, targets = data.load("test")
    is_said = "CIFAR10: not the published files, packed" in capsys.readouterr().out
    assert is_said == packed_anew
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    reference = datasets.CIFAR10(cifar10_dir, train=False, transform=transform)
    expected = torch.stack([image for image, _ in reference])
    torch.testing.assert_close(data.normalize(inputs), expected)
    assert targets.tolist() == [label for _, label in reference]


class RunsCode:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, ("run", "w")


@pytest.mark.parametrize("how", ["cut", "empty", "code", "keys"])
def test_a_damaged_or_foreign_file_is_not_trained_on(
    cifar10_dir, how, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = cifar10_dir / "cifar-10-batches-py" / "data_batch_3"
    content = {
        "cut": file.read_bytes()[:-7],
        "empty": b"",
        "code": pickle.dumps(RunsCode()),
    }
    file.write_bytes(content.get(how, pickle.dumps({})))
    with pytest.raises(
        UserError, match=r"data_batch_3 cannot be read: .*\nmove it away to"
    ):
        CIFAR10(data_dir=str(cifar10_dir)).load("train")
    assert not Path("run").exists()


@pytest.mark.usefixtures("published", "offline")
def test_a_file_of_the_published_size_has_the_published_content(
    cifar10_dir: Path,
) -> None:
    file = cifar10_dir / "cifar-10-batches-py" / "data_batch_3"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        UserError, match=r"CIFAR10 is not in .*, or damaged, and cannot be"
    ):
        CIFAR10(data_dir=str(cifar10_dir)).load("train")
    assert file.read_bytes() == content
