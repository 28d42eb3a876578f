"""The finders of batch size and learning rate: what they suggest, what they leave behind, what they
say."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example.models.mlp import MLP
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from paths import TINY, script
from torch import Tensor
from torch.utils.data import DataLoader

tune = script("tune")
Tune = Callable[..., list[str]]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> list[str]:
        flags = ("--config", TINY, "--trainer.default_root_dir", tmp_path)
        return tune.main([*map(str, (*flags, "--data.num_train", 1000, *args))])

    return run


@pytest.mark.slow
def test_both_are_suggested_as_flags_that_train(find, train, tmp_path, capsys):
    flags = find("--num_steps", 100, "--max_batch_size", 128)
    assert flags[::2] == ["--data.batch_size", "--model.lr"]
    assert capsys.readouterr().out.splitlines()[-1] == f"Suggested flags: {' '.join(flags)}"
    assert int(flags[1]) in (16, 32, 64, 128)
    assert 1e-5 < float(flags[3]) < 0.3
    folder = tmp_path / "tiny_tune" / "version_0"
    names = {path.name.partition(".")[0] for path in folder.iterdir()}
    assert names == {"batch_size", "lr"}
    assert list(tmp_path.iterdir()) == [folder.parent], "nothing else is left"
    assert (folder / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert train("--data.num_train", 1000, "--trainer.max_epochs", 6, *flags)["test/acc"] > 0.6


class MemoryOf100(MLP):
    """A network for whose batches over 100 samples there is no memory."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        return super().forward(x)


def table(shown: str) -> list[int]:
    lines = shown.split("Batch size    samples/s\n")[1].splitlines()
    return [int(line.split()[0]) for line in lines if line.startswith("   ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sizes", "words"),
    [
        ("--data.batch_size 24 --model.net test_tune.MemoryOf100", [24, 48, 96], "96 fits; larger"),
        ("--data.batch_size 300 --model.net test_tune.MemoryOf100", [75], "75 fits; larger"),
        ("--data.batch_size 10 --max_batch_size 40", [10, 20, 40], "40 fits; the limit is 40"),
    ],
)
def test_the_search_starts_at_the_batch_size_given_and_ends_where_memory_does(
    find, capsys, flags, sizes, words
):
    find("--find", "batch_size", *flags.split())
    shown = capsys.readouterr().out
    assert table(shown)[-len(sizes) :] == sizes
    assert words in shown


def test_the_finder_sees_the_rates_given_and_a_loss_that_begins_at_its_height(find, monkeypatch):
    """With a rate of next to nothing the loss is the same all along, about log(4), which Lightning
    starts at half."""
    seen: list[Any] = []
    monkeypatch.setattr(tune, "plot", lambda *args: seen.extend(args[3:5]))
    schedule = ("--model.scheduler", "StepLR", "--model.scheduler_args.step_size", 1)
    with pytest.raises(SystemExit):
        find("--find=lr", "--min_lr", 1e-12, "--max_lr", 1e-11, "--num_steps", 60, *schedule)
    rates, losses = seen
    assert len(rates) == len(losses) == 60
    assert (rates[0], rates[-1]) == (pytest.approx(1e-12), pytest.approx(1e-11, rel=0.06))
    assert losses == pytest.approx([math.log(4)] * 60, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max_lr", 2e-5), "give another --min_lr or --max_lr"),
        (("--trainer.strategy", "ddp", "--trainer.devices", 2), "trains on one device"),
        (("--find", "batch_size", "--max_batch_size", 2), "no batch size from 16 to 2 fits"),
    ],
)
def test_mistakes_and_too_small_a_range_are_told_in_two_lines(find, capsys, flags, words):
    with pytest.raises(SystemExit) as caught:
        find("--find", "lr", "--num_steps", 100, *flags)
    assert caught.value.code in (1, 2)
    error = capsys.readouterr().err.partition("error: ")[2]  # before it, Lightning's bar
    assert words in error
    assert error.count("\n") <= 2


@pytest.mark.parametrize("finder", ["BatchSizeFinder", "LearningRateFinder"])
def test_a_finder_within_a_run_is_refused(train, tmp_path, capsys, finder):
    with pytest.raises(SystemExit):
        train(f"--trainer.callbacks lightning.pytorch.callbacks.{finder}")
    error = capsys.readouterr().err
    assert f"a {finder} changes a setting of the run; search before the run" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0, 1.0, 0.1, 0.2, math.nan], 1e-3),
        ([2.0, 1.0, 0.5, 0.2, 0.1], None),  # still falls at the end
        ([1.0, 2.0, 3.0, 4.0, math.inf], None),
        ([math.nan] * 5, None),
    ],
)
def test_a_tenth_of_the_rate_of_the_lowest_loss(find, monkeypatch, losses, expected):
    rates = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    finder = SimpleNamespace(results={"lr": rates, "loss": losses})
    monkeypatch.setattr(tune.Tuner, "lr_find", lambda *_, **__: finder)
    with pytest.raises(SystemExit) if expected is None else contextlib.nullcontext():
        assert find("--find=lr", "--min_lr", 1e-4) == ["--model.lr", f"{expected:.2g}"]


class LitNet(BoringModel):
    """As tutorials write it: what it needs stands in its hyper-parameters."""

    def __init__(self, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"])


class LitData(BoringDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 400), batch_size=self.hparams["batch_size"])


@pytest.mark.slow
def test_modules_of_ones_own_are_tuned_by_their_hyper_parameters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = f"--trainer.accelerator cpu --trainer.default_root_dir {tmp_path} --num_steps 100"
    own = "--model test_tune.LitNet --data test_tune.LitData --max_batch_size 32 --max_lr 300"
    suggested = tune.main([*flags.split(), *own.split()])
    assert suggested[::2] == ["--data.batch_size", "--model.learning_rate"]
    assert table(capsys.readouterr().out) == [8, 16, 32]
    boring = "--model lightning.pytorch.demos.boring_classes.BoringModel --data test_tune.LitData"
    with pytest.raises(SystemExit):
        tune.main([*flags.split(), *boring.split()])
    assert "BoringModel has no argument lr or learning_rate" in capsys.readouterr().err
