"""The finders of batch size and learning rate: what they suggest, what they leave behind, what they
say."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example.models.mlp import MLP
from lightning import LightningDataModule, LightningModule
from paths import TINY, script
from test_prediction_figures import events
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightbase.tools.tune import batch_losses, choose

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
def test_both_are_suggested_as_flags_and_nothing_else_is_left(find, tmp_path, capsys):
    flags = find("--num_steps", 100, "--max_batch_size", 128)
    assert flags[::2] == ["--data.batch_size", "--model.lr"]
    assert capsys.readouterr().out.splitlines()[-1] == f"Suggested flags: {' '.join(flags)}"
    assert int(flags[1]) in (16, 32, 64, 128)
    assert 1e-5 < float(flags[3]) < 0.3
    folder = tmp_path / "tiny_tune" / "version_0"
    names = {path.name.partition(".")[0] for path in folder.iterdir()}
    assert names == {"batch_size", "lr", "events"}
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents
    ] == []
    assert events(folder).Tags()["images"] == ["tune/batch_size", "tune/lr"]
    assert (folder / "lr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_suggested_flags_train(find: Tune, train: Callable[..., dict[str, Any]]) -> None:
    flags = find("--find", "lr", "--num_steps", 100)
    assert train("--data.num_train", 1000, "--trainer.max_epochs", 4, *flags)["test/acc"] > 0.6


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
def test_the_search_starts_at_the_batch_size_given_and_ends_where_memory_does(find, capsys):
    find("--find", "batch_size", "--data.batch_size", 24, "--model.net", "test_tune.MemoryOf100")
    shown = capsys.readouterr().out
    assert table(shown) == [24, 48, 96]
    assert "96 is the largest that fits" in shown

    find("--find", "batch_size", "--data.batch_size", 300, "--model.net", "test_tune.MemoryOf100")
    shown = capsys.readouterr().out
    assert max(table(shown)) == 75
    assert "75 is the largest that fits" in shown
    find("--find", "batch_size", "--data.batch_size", 10, "--max_batch_size", 40)
    shown = capsys.readouterr().out
    assert table(shown) == [10, 20, 40]
    assert "larger ones than 40 were not tried" in shown


def test_the_search_of_the_rate_starts_and_ends_where_told(find, monkeypatch, capsys):
    seen: list[float] = []
    monkeypatch.setattr(tune, "choose", lambda rates, *_: (seen.extend(rates), (30, "ok"))[1])
    group = ("--model.parameter_groups.norms_and_biases", "{lr: 0.1}")
    schedule = ("--model.scheduler", "StepLR", "--model.scheduler_args.step_size", 1)
    find("--find=lr", "--min_lr", 2e-4, "--max_lr", 4e-3, "--num_steps", 60, *group, *schedule)
    assert "gives all parameter groups one rate" in capsys.readouterr().out
    assert seen[0] == pytest.approx(2e-4)
    assert seen[-1] == pytest.approx(4e-3, rel=0.06)
    assert len(seen) == 60


def test_the_losses_are_those_of_the_batches(find: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate of next to nothing the loss is the same all along, about log(4), which Lightning
    starts at half."""
    seen: list[float] = []
    monkeypatch.setattr(
        tune, "choose", lambda rates, losses, *_: (seen.extend(losses), (30, "ok"))[1]
    )
    find("--find", "lr", "--min_lr", 1e-12, "--max_lr", 1e-11, "--num_steps", 60)
    assert np.mean(seen) == pytest.approx(math.log(4), rel=0.15)
    assert np.std(seen) < 0.05 * np.mean(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max_lr", 2e-5), "the loss does not fall from 1e-05 to 2e-05: give a larger --max_lr"),
        (("--min_lr", 0.2, "--max_lr", 50), "--min_lr"),
        (("--max_lr", 3e-3), "give a larger one"),
        (("--min_lr", 1, "--max_lr", 0.1), "--min_lr 1.0 --max_lr 0.1: the first must be"),
        (("--num_steps", 7), "--num_steps 7: 50 is the least"),
        (("--trainer.strategy", "ddp", "--trainer.devices", 2), "tune.py uses one device"),
        (
            ("--find", "batch_size", "--data.batch_size", 64, "--max_batch_size", 32),
            "is over --max_batch_size 32",
        ),
        (("--find", "rate"), "invalid choice: 'rate'"),
        (("--model.lrr", 1), "unknown key model.lrr; did you mean model.lr?"),
    ],
)
def test_mistakes_and_too_small_a_range_are_told_in_two_lines(find, capsys, flags, words):
    with pytest.raises(SystemExit) as caught:
        find("--find", "lr", "--num_steps", 100, *flags)
    assert caught.value.code in (1, 2)
    error = capsys.readouterr().err.partition("error: ")[2]  # before it, Lightning's bar
    assert words in error
    assert error.count("\n") <= 2


def test_a_tenth_of_the_rate_of_the_lowest_loss() -> None:
    rates = np.logspace(-6, 0, 200)
    noise = 0.02 * np.random.default_rng(0).normal(size=200)
    fall = 1.5 / (1 + np.exp(-4 * (np.log10(rates) + 3)))
    losses = 2.3 - fall + np.maximum(0, np.log10(rates) + 1.5) ** 2 * 20
    index, _ = choose(list(rates), list(losses + noise), 200)
    assert rates[index] == pytest.approx(rates[losses.argmin()] / 10, rel=0.5)
    index, reason = choose(list(rates), list(2.3 + noise), 200)
    assert index is None
    assert "does not fall" in reason


def test_the_means_of_lightnings_finder_are_undone_up_to_the_first_that_is_not_finite() -> None:
    losses = [2.0, 3.0, 1.0, 5.0, math.nan, 1.0]
    average, smoothed = 0.0, []
    for step, loss in enumerate(losses, 1):  # as Lightning has it
        average = 0.98 * average + 0.02 * loss
        smoothed.append(average / (1 - 0.98 ** (step + 1)))
    assert batch_losses(smoothed) == pytest.approx(losses[:4])


class LitNet(LightningModule):
    """As tutorials write it: what it needs stands in its hyper-parameters."""

    def __init__(self, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(10, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"])


class LitData(LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        inputs = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
        return DataLoader(
            TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=self.hparams["batch_size"]
        )


@pytest.mark.slow
def test_modules_of_ones_own_are_tuned_by_their_hyper_parameters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "own.yaml"
    config.write_text(
        "model: {class_path: test_tune.LitNet}\ndata: {class_path: test_tune.LitData}\n"
    )
    flags = f"--trainer.accelerator cpu --trainer.default_root_dir {tmp_path} "
    flags += "--max_batch_size 32 --num_steps 100 --max_lr 300"
    suggested = tune.main(["--config", str(config), *flags.split()])
    assert suggested[::2] == ["--data.batch_size", "--model.learning_rate"]
    assert table(capsys.readouterr().out) == [8, 16, 32]


def test_modules_without_them_are_refused(tmp_path, capsys):
    config = tmp_path / "boring.yaml"
    boring = "lightning.pytorch.demos.boring_classes.Boring"
    config.write_text(
        f"model: {{class_path: {boring}Model}}\ndata: {{class_path: {boring}DataModule}}\n"
    )
    for what, words in (
        ("lr", "BoringModel has no lr or learning_rate"),
        ("batch_size", "BoringDataModule has no bat"),
    ):
        flags = f"--config {config} --find {what} --trainer.default_root_dir {tmp_path}"
        with pytest.raises(SystemExit):
            tune.main(flags.split())
        assert words in capsys.readouterr().err
