"""A download of torchvision that fails, or brings a file that is cut short."""

import gc
import http.server
import tarfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small import Points
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive

from lightbase import short_download_errors

# urllib leaves the socket of a refused connection to the garbage collector
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
CLOSED = "http://127.0.0.1:9"  # nobody listens there
Train = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a web server with archives that are cut short."""
    tmp_path /= "served"
    tmp_path.mkdir()
    (tmp_path / "set.zip").write_bytes(b"PK\x03\x04 cut short")
    (tmp_path / "set.dat").write_bytes(bytes(range(256)) * 100)
    for kind in ("gz", "xz"):
        path = tmp_path / f"set.tar.{kind}"
        with tarfile.open(path, f"w:{kind}") as archive:  # type: ignore[call-overload]
            archive.add(tmp_path / "set.dat", "set.dat")
        path.write_bytes(path.read_bytes()[:100])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))
    ) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_a_failed_download_of_torchvision_is_two_lines(
    train, server, tmp_path, capsys, monkeypatch
):
    for i, (address, md5) in enumerate(
        (
            (f"{CLOSED}/set.zip", None),
            (f"{server}/none.zip", None),
            (f"{server}/set.zip", None),
            (f"{server}/set.zip", "0" * 32),
            (f"{server}/set.tar.gz", None),
            (f"{server}/set.tar.xz", None),
        )
    ):

        def init(
            self: Any,
            root: str,
            download: bool = False,
            address: str = address,
            md5: str | None = md5,
        ) -> None:
            if not download:
                raise RuntimeError("Dataset not found")
            download_and_extract_archive(address, root, md5=md5)

        monkeypatch.setattr(datasets.CIFAR10, "__init__", init)
        folder = tmp_path / f"data_{i}"
        with pytest.raises(SystemExit) as caught:
            train(
                "--data",
                "lightbase.TorchvisionSet",
                "--data.dataset=CIFAR10",
                "--data.data_dir",
                folder,
            )
        assert caught.value.code == 1
        lines = (
            capsys.readouterr().err.rpartition("error: ")[2].splitlines()
        )  # behind torchvision's progress bar
        assert len(lines) == 2, lines
        assert lines[0].startswith(
            f"CIFAR10 is not in {folder}, or damaged, and cannot be downloaded: "
        )
        assert lines[1].startswith(
            "move away what is damaged and start the command again; without a network, put "
        )
        assert not (tmp_path / "tiny").exists()


class Fetched(Points):
    def prepare_data(self) -> None:
        with short_download_errors("Fetched", self.data_dir, f"points.csv into {self.data_dir}"):
            urllib.request.urlretrieve(f"{CLOSED}/points.csv", self.data_dir / "points.csv")


def test_a_failed_download_of_the_users_is_two_lines(train, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        train("--data test_download.Fetched --model.net.sizes [10,2] --data.data_dir", tmp_path)
    assert caught.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: Fetched is not in {tmp_path}, or damaged, and cannot be")
    assert lines[1].endswith(f"without a network, put points.csv into {tmp_path}")
