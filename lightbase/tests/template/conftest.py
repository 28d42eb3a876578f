"""These tests are about the template: its pages, YAMLs, benchmark and copies.

They skip themselves in a project that was made from it and has another name, another
README or another version. A test also skips if the page, YAML or class that it is about has been deleted.
"""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import IS_TEMPLATE, PACKAGE, REPO

from lightbase.config.paths import PROJECT


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's repository is the template, as for a script in scripts/. This takes
    the place of the fixture in lightbase/tests/conftest.py."""
    if not IS_TEMPLATE:
        pytest.skip("this is not the template: it has another name, README or version")
    monkeypatch.setattr(PROJECT, "root", REPO)
    monkeypatch.setattr(PROJECT, "default_model", "project.classifier.Classifier")


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which a user follows a page. The modules of the page are forgotten
    after the test: another page may show a file of the same name."""
    monkeypatch.chdir(tmp_path)
    for name in ("logs", "data"):
        monkeypatch.setattr(f"lightbase.config.paths.Project.{name}", tmp_path / name)
    modules = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - modules:
        if name.startswith(f"{PACKAGE}."):
            del sys.modules[name]
    gc.collect()  # or jsonargparse finds their classes in other tests
