"""A download in a data module's prepare_data that fails, or brings a file that is cut short."""

import gc
import http.server
import threading
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning import LightningDataModule
from torchvision.datasets.utils import download_url

from project.engine.script import short_errors

# urllib leaves the socket of a refused connection to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
CLOSED = "http://127.0.0.1:9/points.zip"  # nobody listens there


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    yield
    gc.collect()


class Unreachable(LightningDataModule):
    """A plain data module, whose prepare_data Lightning calls."""

    def prepare_data(self) -> None:
        urllib.request.urlretrieve(CLOSED)

    def train_dataloader(self) -> Any:
        raise AssertionError("not reached")

    val_dataloader = train_dataloader


def refused(capsys: pytest.CaptureFixture[str], run: Callable[[], Any]) -> str:
    with pytest.raises(SystemExit) as caught, short_errors():
        run()
    assert caught.value.code == 1
    error = capsys.readouterr().err.rpartition("error: ")[2]  # behind torchvision's progress bar
    assert len(error.splitlines()) == 2
    assert "test_download.py, line " in error
    return error


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a web server with a file that is no zip."""
    (tmp_path / "points.zip").write_bytes(b"PK\x03\x04 cut short")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_a_failed_download_is_two_lines(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare_data(get: Callable[[], Any]) -> None:
        get()

    def load(get: Callable[[], Any]) -> None:
        get()

    def unpack() -> None:
        zipfile.ZipFile(urllib.request.urlretrieve(f"{server}/points.zip", tmp_path / "got.zip")[0])

    for get, words in (
        (lambda: urllib.request.urlretrieve(CLOSED), "refused"),
        (lambda: urllib.request.urlretrieve(f"{server}/none.zip"), "HTTPError: HTTP Error 404"),
        (unpack, "File is not a zip file"),
        (lambda: download_url(f"{server}/points.zip", str(tmp_path / "sum"), md5="0" * 32), "corrupted"),
        (lambda: (tmp_path / "nowhere").read_bytes(), "No such file"),
    ):
        assert words in refused(capsys, lambda get=get: prepare_data(get))  # type: ignore[misc]
        with (
            pytest.raises(Exception, match=words.split(": ")[-1]),
            short_errors(),
        ):  # elsewhere it is a bug, with its traceback
            load(get)
    with pytest.raises(KeyError), short_errors():
        prepare_data(lambda: {}["bug"])
    with pytest.raises(RuntimeError, match="bug"), short_errors():
        prepare_data(lambda: (_ for _ in ()).throw(RuntimeError("bug")))


def test_a_failed_download_of_a_plain_data_module(
    train: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "refused" in refused(capsys, lambda: train("--data", "test_download.Unreachable"))
