"""Each private attribute that compat.py reads or sets still does what the library
relies on.

A test that fails after an upgrade names the function of compat.py to look at. Some also
show that
the package still needs it: where such a line fails, the function may go.
"""

import os
import platform
import subprocess
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser, _typehints
from lightning import Trainer
from torch import nn

from lightbase.core import compat


@pytest.fixture
def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--number", type=int, required=True, help="how many")
    parser.add_argument("--switch", type=bool, default=False)
    parser.add_argument("--net", type=nn.Module)
    return parser


def test_arguments_of(parser: ArgumentParser) -> None:
    arguments = {action.dest: action for action in compat.arguments_of(parser)}
    arguments["number"].help = "how many of them"
    arguments["switch"].nargs, arguments["switch"].const = "?", True
    assert "how many of them" in parser.format_help()
    assert parser.parse_args(["--number", "1", "--switch"]).switch is True


def test_parse_unvalidated(parser: ArgumentParser) -> None:
    with pytest.raises(ArgumentError):
        parser.parse_args([])
    assert compat.parse_unvalidated(parser.parse_args, []).number is None
    flags = compat.parse_unvalidated(
        parser.parse_args, ["--number", "2"], defaults=False
    )
    assert flags.as_dict() == {"number": 2}
    assert (
        compat.parse_unvalidated(parser.parse_object, {"switch": True}).switch is True
    )


def test_a_class_is_found_by_its_name_where_the_type_is_a_class(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_typehints, "resolve_class_path_by_name", compat.FIND_CLASS)
    names = {"Mine": "torch.nn.Identity"}
    compat.resolve_class_names(lambda name: names.get(name, name))
    flags = ["--number", "1", "--net", "Mine"]
    assert parser.parse_args(flags).net.class_path == "torch.nn.Identity"


def test_attributes_of_the_trainer_that_tests_of_training_rely_on() -> None:
    """Where one is missing, the functions of compat.py that name it are to be looked
    at."""
    trainer: Any = Trainer(accelerator="cpu", logger=False, max_epochs=1)
    loop = trainer.fit_loop
    assert {"_data_fetcher", "_combined_loader", "_restarting"} <= vars(loop).keys()
    assert loop.epoch_loop._batches_that_stepped == 0
    assert callable(loop.epoch_loop._broadcast_sigterm_tensor)
    assert trainer._signal_connector.received_sigterm is False
    connector = compat.logger_connector(trainer)
    for name in ("on_batch_start", "on_batch_end", "update_train_step_metrics"):
        assert callable(getattr(connector, name))


def test_start_at_epoch_begin() -> None:
    trainer: Any = Trainer(accelerator="cpu", logger=False, max_epochs=-1, max_steps=2)
    trainer.fit_loop.restarting = False
    assert trainer.fit_loop.restarting  # as long as Lightning's issue 19617 is open
    compat.start_at_epoch_begin(trainer)
    assert not trainer.fit_loop.restarting
    assert not trainer.fit_loop.epoch_loop.restarting


def test_started_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(
        os, "environ", dict(os.environ)
    )  # Lightning sets the port for all
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **_: commands.append(command) or 7
    )
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    trainer.strategy.launcher._call_children_scripts()  # `launch` would also watch them
    assert len(commands) == 1
    assert compat.started_processes(trainer) == [7]
    for strategy in ("auto", "ddp_spawn"):
        other = Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
        assert compat.started_processes(other) == []


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="keys of x86")
def test_torch_names_the_capabilities_of_this_cpu() -> None:
    assert torch.cpu.get_capabilities().keys() >= {"avx512_bf16", "amx_tile"}
