"""For the tests of your project: `pytest tests/project` after each edit."""

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: tests share the cores

import pytest
from generated import cifar10_dir, mnist_dir  # noqa: F401  # fixtures
from pages import REPO

from lightbase.core.folder import PROJECT


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a script in scripts/."""
    monkeypatch.setattr(PROJECT, "root", REPO)
    monkeypatch.setattr(PROJECT, "default_model", "project.classifier.Classifier")
