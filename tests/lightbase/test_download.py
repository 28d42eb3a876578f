"""A download of torchvision that fails, or brings a file that is cut short."""

import gc
import http.server
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive

# urllib leaves the socket of a refused connection to the garbage collector
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a web server with archives that are cut short."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "set.zip").write_bytes(b"PK\x03\x04 cut short")
    with tarfile.open(folder / "set.tar.xz", "w:xz") as archive:
        archive.add(folder / "set.zip", "set.zip")
    (folder / "set.tar.xz").write_bytes((folder / "set.tar.xz").read_bytes()[:60])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


@pytest.mark.parametrize(
    ("address", "md5"),
    [
        ("http://127.0.0.1:9/set.zip", None),  # nobody listens there
        ("SERVER/none.zip", None),
        ("SERVER/set.zip", None),
        ("SERVER/set.zip", "0" * 32),
        ("SERVER/set.tar.xz", None),
    ],
)
def test_a_failed_download_is_two_lines(train, server, tmp_path, capsys, monkeypatch, address, md5):
    address = address.replace("SERVER", server)

    def init(self: Any, root: str, download: bool = False) -> None:
        if not download:
            raise RuntimeError("Dataset not found")
        download_and_extract_archive(address, root, md5=md5)

    monkeypatch.setattr(datasets.CIFAR10, "__init__", init)
    data = ["--data", "lightbase.TorchvisionSet", "--data.dataset", "CIFAR10"]
    with pytest.raises(SystemExit) as caught:
        train(*data, "--data.data_dir", tmp_path / "data")
    assert caught.value.code == 1
    # behind torchvision's progress bar
    first, second = capsys.readouterr().err.rpartition("error: ")[2].splitlines()
    what = f"CIFAR10 is not in {tmp_path / 'data'}, or damaged, and cannot be downloaded: "
    assert first.startswith(what)
    assert "without a network, put " in second
    assert not (tmp_path / "tiny").exists()
