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
from lightning import Callback, Trainer
from plain import PlainData, PlainModule
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
    assert callable(loop.setup_data)
    assert callable(loop.epoch_loop._broadcast_sigterm_tensor)
    assert callable(loop.epoch_loop.update_lr_schedulers)
    assert trainer._signal_connector.received_sigterm is False


class Counts(Callback):
    """Notes the counters in the middle of an epoch, and the order of its batches."""

    def __init__(self, at_batch: int) -> None:
        self.at_batch = at_batch

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if compat.batch_index(trainer) == self.at_batch and trainer.current_epoch == 1:
            self.counts = [
                compat.num_batches(trainer),
                compat.epochs_begun(trainer),
                compat.epochs_done(trainer),
                compat.logged_step(trainer),
            ]
            self.state = {"loops": {"fit_loop": compat.fit_loop_state(trainer)}}


@pytest.mark.filterwarnings("ignore::Warning")  # of Lightning, about loaders and logs
def test_the_counters_of_the_loop_and_of_its_state() -> None:
    counts = Counts(at_batch=8)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[counts],
    )
    trainer.fit(PlainModule(), PlainData())  # 19 batches, 10 steps an epoch
    assert counts.counts == [19 + 9, 2, 1, 10 + 4]
    saved = counts.state
    assert compat.saved_batches(saved)["ready"] == 19 + 9
    epochs = compat.saved_epochs(saved)["current"]
    assert (epochs["ready"], epochs["processed"]) == (2, 1)
    assert compat.saved_logged_step(saved) == 10 + 4
    assert compat.epochs_done(trainer) == 2


def test_skip_ended_epoch() -> None:
    trainer: Any = Trainer(accelerator="cpu", logger=False, max_epochs=-1, max_steps=2)
    loop = trainer.fit_loop
    loop.restarting = False
    assert loop.restarting  # as long as Lightning's issue 19617 is open
    compat.skip_ended_epoch(trainer)
    assert loop.restarting  # the epoch has not ended
    for progress in (loop.epoch_progress.total, loop.epoch_progress.current):
        progress.ready = progress.started = progress.processed = 1
    loop.update_restart_stage()
    assert loop.restarted_on_epoch_end
    compat.skip_ended_epoch(trainer)
    assert not loop.restarting
    assert not loop.epoch_loop.restarting
    assert loop.epoch_progress.current.completed == 1


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
