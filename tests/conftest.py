"""What the tests of your project share. Type `pytest tests` after each edit."""

import os

# before torch is imported: tests that run side by side share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import pytest
from generated import cifar10_dir, mnist_dir, offline  # noqa: F401  # fixtures
from hermetic import leaves_nothing, temporary_folder  # noqa: F401  # fixtures


@pytest.fixture
def classifier() -> Any:
    """The class `Classifier`, for tests of a choice among classes. They are skipped
    if you have deleted it, or have edited it for another task."""
    classifier = pytest.importorskip("project.classifier").Classifier
    if classifier.task != "multiclass":
        pytest.skip(f"your Classifier has the task {classifier.task}")
    return classifier


@pytest.fixture
def regressor() -> Any:
    """The class `Regressor`. Tests of it are skipped if you have deleted it."""
    return pytest.importorskip("project.regressor").Regressor
