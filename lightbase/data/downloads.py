"""Files of data sets: download them if they are missing, with short errors.

`open_or_download` is for data sets of torchvision. For other downloads,
`short_download_errors` turns any error into two lines; docs/data.md has an example.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from torchvision.datasets.utils import check_integrity

from lightbase.config.errors import UserError


def open_or_download(
    source: Any,
    data_dir: Path,
    files: str,
    published: Mapping[str, tuple[int, str]] = {},
    **options: Any,
) -> Any:
    """Return a data set of torchvision. If its files are missing, one process downloads
    them. Other processes wait, and torchvision then finds the files.

    Args:
        source: A class of torchvision.datasets, such as MNIST.
        data_dir: The folder for the download. It is made if it is missing.
        files: A text for the error: which files a user without a network has to put
            where, such as "a.gz and b.gz into data/X".
        published: {path below data_dir: (size in bytes, MD5)}, for data sets whose
            files torchvision does not check. A file of this size must have this MD5. A
            file of another size is taken for other data and is not checked.
        options: The arguments of `source`, such as `root` and `train`.
    """
    name = source.__name__
    for path, (size, md5) in published.items():
        file = data_dir / path
        has_size = file.is_file() and file.stat().st_size == size
        if has_size and not check_integrity(file, md5):
            raise UserError(f"{file} is damaged: move it away to download it again")
    with short_download_errors(name, data_dir, files):
        try:
            return source(**options)
        except Exception:  # files that are missing or damaged, or being downloaded
            data_dir.mkdir(parents=True, exist_ok=True)
            with FileLock(data_dir / f".{name}.lock"):
                return source(**options, download=True)


@contextlib.contextmanager
def short_download_errors(name: str, data_dir: Path, files: str) -> Iterator[None]:
    """Turn any error of a download, of unpacking or of reading into a UserError. It
    says which files belong into which folder.

    Args:
        name: The name of the data set.
        data_dir: The folder in which the files were expected.
        files: See `open_or_download`.
    """
    try:
        yield
    except Exception as error:  # of many types, also of the archives
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        raise UserError(
            f"{name} is not in {data_dir}, or damaged, and cannot be downloaded: "
            f"{reason}",
            "move away what is damaged and start the command again; "
            f"without a network, put {files}",
        ) from error
