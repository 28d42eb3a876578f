"""Each private attribute that compat.py reads or sets still does what the library relies on.

A test that fails after an upgrade names the function of compat.py to look at. Some also show that
the package still needs it: where such a line fails, the function may go.
"""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets

from lightbase import compat

Hook = Callable[..., Any]
Metrics = dict[str, float]


class Net(LightningModule):
    """One weight; `batches` holds the numbers that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.batches: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.batches += batch.flatten().tolist()
        self.log("loss", self.weight)
        return self.weight * batch.float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(DummyLogger):
    """A logger that keeps (step, values)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, Metrics]] = []

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class FourNumbers:
    """A loader of 0, 1, 2, 3, one a batch, which goes on from its state."""

    start = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.start, 4):
            self.start = (number + 1) % 4
            yield torch.tensor([number])

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.start = state_dict["start"]


def fit(
    model: LightningModule, data: Any, ckpt_path: Path | None = None, **options: Any
) -> Trainer:
    """Train on the CPU, and write nothing; hooks of a callback are options too."""
    hooks = {name: options.pop(name) for name in list(options) if name.startswith("on_")}
    compat.quiet_lightning()
    callback = type("Hooks", (Callback,), {name: staticmethod(hooks[name]) for name in hooks})()
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **{"logger": False, "max_epochs": 1, "log_every_n_steps": 1, **options},
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer


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
    flags = compat.parse_unvalidated(parser.parse_args, ["--number", "2"], defaults=False)
    assert flags.as_dict() == {"number": 2}
    assert compat.parse_unvalidated(parser.parse_object, {"switch": True}).switch is True


def test_import_rules(parser: ArgumentParser) -> None:
    flags = ["--number", "1", "--net", "torch.nn.Identity"]
    rules = compat.import_rules()
    set_parsing_settings(import_path_denylist=["*", "torch"])
    try:
        with pytest.raises(ArgumentError, match="not allowed"):
            parser.parse_args(flags)
    finally:
        compat.restore_import_rules(rules)
    assert compat.import_rules() == rules
    assert parser.parse_args(flags).net.class_path == "torch.nn.Identity"


def test_data_fetcher_knows_the_last_batch() -> None:
    is_last = []
    fit(
        Net(),
        FourNumbers(),
        on_train_batch_end=lambda trainer, *_: is_last.append(compat.data_fetcher(trainer).done),
    )
    assert is_last == [False, False, False, True]


def test_data_fetcher_starts_again() -> None:
    def begin_again(trainer: Trainer, _: Any) -> None:
        torch.manual_seed(1)
        iter(compat.data_fetcher(trainer))

    orders = []
    for seed in (2, 3):
        model, loader = Net(), DataLoader(torch.arange(20), shuffle=True)
        torch.manual_seed(seed)
        fit(model, loader, on_train_start=begin_again)
        orders.append(model.batches)
    assert orders[0] == orders[1]


class EarlyLoader(Net):
    """Makes the training loader before the checkpoint is loaded."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("forgets", "batches"),
    [(True, [2, 3]), (False, [0, 1])],  # False: as long as Lightning's issue 20550 is open
)
def test_forget_train_loader(forgets: bool, batches: list[int], tmp_path: Path) -> None:
    file = tmp_path / "middle.ckpt"

    def save(trainer: Trainer, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(file)

    def resume(trainer: Trainer, _: Any) -> None:
        if forgets:
            compat.forget_train_loader(trainer)

    fit(Net(), FourNumbers(), on_train_batch_end=save)
    model = EarlyLoader()
    fit(model, FourNumbers(), file, on_fit_start=resume)
    assert model.batches == batches


def test_logged_step_is_the_step_of_loggers() -> None:
    logger = Recorder()

    def log(trainer: Trainer, model: LightningModule, *_: Any) -> None:
        model.log("logged_step", float(compat.logged_step(trainer)))

    def check_checkpoint(trainer: Trainer, *_: Any) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()
        assert compat.logged_step_of(checkpoint) == compat.logged_step(trainer)

    hooks = {"on_train_batch_end": log, "on_train_epoch_end": check_checkpoint}
    fit(Net(), FourNumbers(), max_epochs=2, logger=logger, **hooks)
    steps = [(step, row["logged_step"]) for step, row in logger.rows if "logged_step" in row]
    assert steps == [(step, step) for step in range(8)]


def test_increase_logged_step() -> None:
    logger = Recorder()
    fit(
        Net(),
        FourNumbers(),
        logger=logger,
        on_train_batch_start=lambda trainer, *_: compat.increase_logged_step(trainer),
    )
    assert [step for step, row in logger.rows if "loss" in row] == [1, 3, 5, 7]


def test_logger_connector_ends_and_starts_a_batch() -> None:
    logger = Recorder()

    def two_batches(trainer: Trainer, model: LightningModule, batch: Any, _: int) -> None:
        connector = compat.logger_connector(trainer)
        model.log("first", float(batch))
        connector.on_batch_end()
        connector.update_train_step_metrics()
        assert logger.rows[-1][1]["first"] == float(batch)
        connector.on_batch_start(batch)

    fit(Net(), FourNumbers(), logger=logger, on_train_batch_start=two_batches)
    assert [row["first"] for _, row in logger.rows] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_start_at_epoch_begin() -> None:
    trainer: Any = Trainer(accelerator="cpu", logger=False, max_epochs=-1, max_steps=2)
    trainer.fit_loop.restarting = False
    assert trainer.fit_loop.restarting  # as long as Lightning's issue 19617 is open
    compat.start_at_epoch_begin(trainer)
    assert not trainer.fit_loop.restarting
    assert not trainer.fit_loop.epoch_loop.restarting


def test_replace_signal_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def two_processes(trainer: Trainer, _: Any) -> None:
        compat.replace_signal_exchange(trainer, lambda: calls.append(trainer.fit_loop.batch_idx))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(Trainer, "world_size", 2)

    def one_process(*_: Any) -> None:
        monkeypatch.undo()

    fit(Net(), FourNumbers(), on_train_start=two_processes, on_train_epoch_end=one_process)
    assert calls == [-1, 0, 1, 2]  # before each batch


def test_stop_after_batch() -> None:
    model = Net()

    def stop(trainer: Trainer, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            compat.stop_after_batch(trainer)

    with pytest.raises(SIGTERMException):
        fit(model, FourNumbers(), on_train_batch_end=stop)
    assert model.batches == [0, 1]
    progress = model.trainer.fit_loop.epoch_loop.batch_progress.current
    assert (progress.ready, progress.completed) == (2, 2)


def test_started_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(os, "environ", dict(os.environ))  # Lightning sets the port for all
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command) or 7)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    trainer.strategy.launcher._call_children_scripts()  # `launch` would also watch them
    assert len(commands) == 1
    assert compat.started_processes(trainer) == [7]
    for strategy in ("auto", "ddp_spawn"):
        other = Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
        assert compat.started_processes(other) == []


def test_is_compiled() -> None:
    net, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    assert not compat.is_compiled(net)
    assert compat.is_compiled(torch.compile(net, backend="eager"))
    assert compat.is_compiled(in_place)


def test_labels_of(tmp_path: Path) -> None:
    meta = tmp_path / "food-101" / "meta"
    meta.mkdir(parents=True)
    (tmp_path / "food-101" / "images").mkdir()
    (meta / "train.json").write_text(json.dumps({"cake": ["cake/1", "cake/2"], "egg": ["egg/3"]}))
    assert compat.labels_of(datasets.Food101(tmp_path)) == [0, 0, 1]
    assert compat.labels_of(datasets.FakeData()) is None


@pytest.mark.parametrize("fused", [True, False])
def test_unscales_gradients(fused: bool) -> None:
    weight, gradients = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(float(weight.grad)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8)
    scaler.scale(weight).sum().backward()
    scaler.step(optimizer)
    assert gradients == [8 if compat.unscales_gradients(optimizer) else 1]
    assert compat.unscales_gradients(optimizer) is fused
    assert weight.item() == pytest.approx(0.9)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="keys of x86")
def test_torch_names_the_capabilities_of_this_cpu() -> None:
    assert torch.cpu.get_capabilities().keys() >= {"avx512_bf16", "amx_tile"}
