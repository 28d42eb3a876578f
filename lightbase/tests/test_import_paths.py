"""A setting that takes a class refuses an import path of anything else, in two lines
that say what the path names and what is needed."""

import re

import pytest
from paths import fails, script

from lightbase.commands.train import main

PATHS = {
    "os.system": "a function",
    "lightbase.train": "a function",
    "torch.nn.functional.relu": "a function",
    "torch.nn": "a module",
    "json": "a module",
    "math.pi": "the float 3.14",
    "sys.path": "the list",
    "torch.float32": "the dtype torch.float32",
    "builtins.dict": "another class",
    "torch.utils.data.Dataset": "another class",
    "typing.Any": "another class",
    "no.such.Class": "No module named 'no'",
    "torch.nn.Nope": "has no attribute 'Nope'",
    "torch..nn": "",
    "nope": "",
    ".": "",
    "1": "",
}
QUICK = ("os.system", "math.pi")
SETTINGS = {
    "model": "LightningModule",
    "data": "LightningDataModule",
    "model.net": "Module",
    "model.criterion": "Module",
    "model.metrics": "Metric",
    "model.metrics.f1": "Metric",
    "model.optimizer": "Optimizer",
    "model.scheduler": "LRScheduler",
    "trainer.callbacks": "Callback",
    "trainer.callbacks+": "Callback",
    "trainer.logger": "Logger",
    "trainer.plugins": "Precision",
    "trainer.profiler": "Profiler",
    "trainer.strategy": "Strategy",
    "trainer.accelerator": "Accelerator",
}


def refusal(train, capsys, setting: str, path: str) -> str:
    error = fails(capsys, 2, lambda: train(f"--{setting}", path))
    assert len(error.splitlines()) == 2
    return error


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_no_class_is_told(train, capsys, setting):
    for path in QUICK:
        error = refusal(train, capsys, setting, path)
        pattern = f"error: .*'{path}' is {PATHS[path]}.*, not a subclass of .*"
        assert re.search(f"{pattern}{SETTINGS[setting]}\\b", error), error


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_path_ends_in_a_traceback(train, capsys, setting):
    for path, kind in PATHS.items():
        error = refusal(train, capsys, setting, path)
        # names without a dot may be names of Lightning's or torch's
        assert kind in error or "." not in path, error


@pytest.mark.parametrize("path", ["os.system", "torch.nn", "math.pi", "nope"])
def test_a_model_without_data_is_looked_at_as_well(capsys, path):
    error = fails(capsys, 2, lambda: main(["--model", path]))
    assert "not a subclass of LightningModule" in error or path == "nope"


def returns_a_module() -> None:
    pass


def test_a_function_has_to_be_annotated_with_what_it_returns(capsys):
    path = "test_import_paths.returns_a_module"
    error = fails(capsys, 2, lambda: script("train").main(["--model", path]))
    assert f"model {path!r} is a function, not a subclass of LightningModule" in error
