"""Whole runs of tiny.yaml through main(args)."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import yaml
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from paths import HERE, TINY, Train, Trained, argv, fails, script
from stops import Interrupt, InterruptedRunError, Terminate
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import (
    EventMultiplexer,
)
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import backend_context
from torch import nn
from torch.utils.data import DataLoader, Dataset
from written import checkpoint, curves, equal, weights

from lightbase.core.batches import EpochBatchSampler, ResumableLoader


def test_a_run_learns_and_leaves_a_complete_folder(
    train: Train, tmp_path: Path
) -> None:
    result = train("--trainer.max_epochs", 6, "--data.num_train", 1000)
    folder = tmp_path / "tiny" / "version_0"
    assert result["test/acc"] > 0.6  # chance is 0.25
    assert result["test/num_samples"] == 75
    assert result["epochs"] == 6
    assert result["steps"] == 6 * (900 // 16)
    assert result["train_seconds"] > 0
    assert json.loads((folder / "metrics.json").read_text()) == result
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt"]
    environment = (folder / "environment.txt").read_text()
    for word in ("torch: ", "lightning: ", "python: ", "git commit: ", "processes: 1"):
        assert word in environment
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["init_args"]["num_train"] == 1000
    assert config["data"]["init_args"]["val_fraction"] == 0.1  # defaults too
    assert config["seed_everything"] == 42


def test_the_curves_are_written_on_log_steps_and_every_epoch(trained: Trained) -> None:
    folder, result = trained()
    found = curves(folder)
    steps = 2 * (315 // 16)
    for tag in ("train/loss", "train/acc", "lr"):
        assert [step for step, _ in found[tag]] == sorted({*range(4, steps, 5), 18, 37})
    for tag in ("val/loss", "val/acc"):
        assert [step for step, _ in found[tag]] == [steps // 2 - 1, steps - 1]
    assert found["test/acc"] == [(steps, pytest.approx(result["test/acc"]))]
    assert found["lr"][0][1] == pytest.approx(0.01)


def test_the_hparams_tab_opens_on_what_differs_between_runs(
    train: Train, tmp_path: Path
) -> None:
    for flags in (
        "--patience 2",
        "--model.lr 0.02",
        "--data.batch_size 32 --seed_everything 7",
    ):
        train("--trainer.max_epochs 1", flags)
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = MultiplexerDataProvider(runs, str(tmp_path))
    tab = backend_context.Context(TBContext(data_provider=provider))
    experiment = tab.experiment_from_metadata(
        RequestContext(), "", True, tab.hparams_metadata(RequestContext(), ""), []
    )
    names = [info.name for info in experiment.hparam_infos]
    assert names[:3] == ["data.batch_size", "model.lr", "seed"]
    tags = [info.name.tag for info in experiment.metric_infos]
    assert tags[:5] == [
        "train/acc",
        "train/loss",
        "val/acc",
        "val/loss",
        "view/test/acc",
    ]


@pytest.mark.parametrize(("max_steps", "later"), [(5, 57), (19, -1), (30, -1)])
@pytest.mark.slow
def test_a_run_that_max_steps_has_ended_goes_on_where_it_was(
    train, trained, tmp_path, max_steps, later
):
    flags = argv(
        "--trainer.max_epochs 3 --model.scheduler StepLR "
        "--model.scheduler_args.step_size 1"
    )
    whole, _ = trained(*flags, "--trainer.max_steps", later)
    train(*flags, "--trainer.max_steps", max_steps)
    result = train("--ckpt_path", "last", "--trainer.max_steps", later)
    assert (result["epochs"], result["steps"]) == (3, 57)
    assert equal(weights(whole), weights(tmp_path / "tiny" / "version_0"))


def test_the_same_seed_gives_the_same_metrics_to_the_last_digit_and_another_does_not(
    train, trained, tmp_path
):
    for seed in (42, 2):
        train("--seed_everything", seed, "--name", seed)
    folders = trained()[0], tmp_path / "42" / "version_0", tmp_path / "2" / "version_0"
    first, same, other = map(curves, folders)
    assert first == same
    assert first["train/loss"] != other["train/loss"]
    assert equal(*map(weights, folders[:2]))


def test_train_metrics_are_means_since_the_last_point(
    train: Train, tmp_path: Path
) -> None:
    """Against a plain loop over the same batches."""
    train("--trainer.max_epochs", 1)
    found = curves(tmp_path / "tiny" / "version_0")

    seed_everything(42, workers=True)
    data = SyntheticImages(
        image_shape=(3, 8, 8), num_classes=4, num_train=350, noise=0.05
    )
    net = MLP([192, 16, 4])
    data.setup("fit")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses: list[float] = []
    correct: list[int] = []
    for indices in EpochBatchSampler(315, 16, shuffle=True, drop_last=True, seed=42):
        x, y = data.splits["train"].__getitems__(indices)
        logits = net(data.normalize(x))
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        correct.append(int((logits.argmax(1) == y).sum()))
    assert [step for step, _ in found["train/loss"]] == [4, 9, 14, 18]
    for i, (_, value) in enumerate(found["train/loss"]):
        assert value == pytest.approx(
            statistics.mean(losses[5 * i : 5 * i + 5]), rel=1e-5
        )
    for i, (_, value) in enumerate(found["train/acc"]):
        assert value == pytest.approx(statistics.mean(correct[5 * i : 5 * i + 5]) / 16)


RESUMES = [
    "--model.net test_training.Noisy --model.scheduler WarmupCosineLR "
    "--model.scheduler_interval step",
    "--model.scheduler ReduceLROnPlateau --model.scheduler_args.patience 0",
    "--data.num_workers 2 --model.scheduler FinalDecayLR "
    "--model.scheduler_interval step",
    "--trainer.accumulate_grad_batches 3 --model.scheduler StepLR "
    "--model.scheduler_args.step_size 1 --model.scheduler_args.gamma 0.5",
    "--trainer.val_check_interval 0.3",
    "--trainer.check_val_every_n_epoch 2",
    "--trainer.limit_val_batches 0",
]


class Noisy(nn.Module):
    """A network with dropout, whose random numbers must go on where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.5), nn.Linear(16, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "WarmupCosineLR"])
def test_a_schedule_that_is_made_for_a_length_refuses_another_one(
    train, tmp_path, capsys, name
):
    flags = f"--model.scheduler {name} --trainer.max_epochs"
    train(flags, 1)
    folder = tmp_path / "tiny" / "version_0"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    error = fails(capsys, 2, lambda: train(flags, 3, "--ckpt_path last"))
    assert f"model.scheduler {name} is made for" in error
    assert "--model.weights" in error
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    events = {path for path in after if "tfevents" in path.name}
    assert {path: after[path] for path in after.keys() - events} == {
        path: before[path] for path in before.keys() - events
    }


def test_a_schedule_that_knows_no_length_goes_on_for_longer(train, tmp_path):
    flags = "--model.scheduler StepLR --model.scheduler_args.step_size 1"
    flags += " --trainer.max_epochs"
    train(flags, 1)
    train(flags, 2, "--ckpt_path last")
    train(flags, 2, "--name whole")
    assert equal(
        weights(tmp_path / "tiny" / "version_0"), weights(tmp_path / "whole/version_0")
    )


def test_the_length_of_the_schedule_heeds_max_steps(
    train: Train, tmp_path: Path
) -> None:
    flags = argv(
        "--trainer.log_every_n_steps 1 --model.scheduler CosineAnnealingLR "
        "--trainer.max_epochs -1"
    )
    train(*flags, "--trainer.max_steps", 38)
    rates = [value for _, value in curves(tmp_path / "tiny" / "version_0")["lr"]]
    assert rates == pytest.approx([0.01] * 19 + [0.005] * 19)


def test_nothing_is_selected_on_test_data(train, tmp_path, capsys):
    train("--data.val_fraction 0 --trainer.max_epochs 3 --model.lr 0.5")
    folder = tmp_path / "tiny" / "version_0"
    assert equal(weights(folder, "best"), weights(folder, "last"))
    assert checkpoint(folder, "best")["epoch"] == 2
    assert "best.ckpt is the last epoch (data.val_fraction 0: val/ is measured" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "flags",
    [
        RESUMES[0],
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in RESUMES[1:]),
    ],
)
def test_a_resumed_run_ends_with_the_weights_and_curves_of_an_uninterrupted_one(
    train, tmp_path, flags, monkeypatch
):
    monkeypatch.setattr(Interrupt, "at_epoch", None)
    whole = train(flags, "--trainer.max_epochs 4 --name whole")
    cut = (
        flags,
        "--trainer.max_epochs 4 --name cut --trainer.callbacks stops.Interrupt",
    )
    monkeypatch.setattr(Interrupt, "at_epoch", 2)
    with pytest.raises(InterruptedRunError):
        train(*cut)
    monkeypatch.setattr(Interrupt, "at_epoch", None)
    resumed = train(*cut, "--ckpt_path last")
    folders = tmp_path / "whole" / "version_0", tmp_path / "cut" / "version_0"
    assert not (tmp_path / "cut" / "version_1").exists()
    assert equal(*map(weights, folders))
    assert equal(*(weights(folder, "best") for folder in folders))
    expected, found = map(curves, folders)
    assert found == expected
    assert {**resumed, "train_seconds": 0} == {**whole, "train_seconds": 0}
    assert progress(folders[0]) == progress(folders[1])


def progress(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "progress.json").read_text()), "train_seconds": 0}


@pytest.mark.parametrize(
    ("at_batch", "number", "name"),
    [
        (7, signal.SIGTERM, "SIGTERM"),
        (7, signal.SIGHUP, "SIGHUP"),
        pytest.param(7, signal.SIGINT, "Ctrl-C", marks=pytest.mark.slow),
        # the first and the last batch of an epoch
        pytest.param(0, signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow),
        pytest.param(18, signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow),
    ],
)
@pytest.mark.linux
def test_a_signal_keeps_the_state_between_two_batches(
    train, trained, tmp_path, monkeypatch, capsys, at_batch, number, name
):
    flags = "--trainer.max_epochs 3 --trainer.callbacks stops.Terminate"
    whole, _ = trained(flags)
    monkeypatch.setattr(Terminate, "at_batch", at_batch)
    monkeypatch.setattr(Terminate, "number", number)
    handlers = list(map(signal.getsignal, signal.valid_signals()))
    with pytest.raises(SystemExit) as caught:
        train(flags, "--name cut")
    assert caught.value.code == 128 + number
    line, command = capsys.readouterr().err.splitlines()
    assert line == f"Stopped by {name}; to continue:"
    assert list(map(signal.getsignal, signal.valid_signals())) == handlers
    folders = whole, tmp_path / "cut" / "version_0"
    # after the last batch comes the validation, from which Lightning cannot go on: one
    # more batch
    num_batches = 38 + 1 if at_batch == 18 else 19 + at_batch + 1
    assert checkpoint(folders[1])["global_step"] == num_batches
    monkeypatch.setattr(Terminate, "at_batch", None)
    script("train").main(command.split()[2:])
    assert equal(*map(weights, folders))
    assert equal(*(weights(folder, "best") for folder in folders))
    assert curves(folders[0]) == curves(folders[1])


class Shaken(Dataset[tuple[torch.Tensor, int]]):
    """Images that each reading changes at random."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, 8, 8) + random.random() + i / 120, i % 4


class OurLoader(LightningDataModule):
    """A plain data module with our loader, of a Dataset that knows nothing of it."""

    def train_dataloader(self) -> ResumableLoader:
        sampler = EpochBatchSampler(120, 10, shuffle=True)
        return ResumableLoader(
            Shaken(), sampler, num_workers=2, persistent_workers=True
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shaken(), batch_size=10)


@pytest.mark.slow
@pytest.mark.linux
def test_our_loader_goes_on_in_any_data_module_and_draws_no_number_of_others(
    train, tmp_path, monkeypatch
):
    flags = "--data test_training.OurLoader --model.net test_training.Noisy"
    flags += " --trainer.max_epochs 3"
    flags += " --model.scheduler CosineAnnealingLR --trainer.callbacks stops.Terminate"
    train(flags, "--name whole")
    monkeypatch.setattr(Terminate, "at_batch", 7)
    with pytest.raises(SystemExit):
        train(flags, "--name cut")
    monkeypatch.setattr(Terminate, "at_batch", None)
    train(flags, "--name cut --ckpt_path last")
    assert equal(
        weights(tmp_path / "whole" / "version_0"),
        weights(tmp_path / "cut" / "version_0"),
    )


@pytest.mark.linux
def test_a_signal_before_the_training_ends_it_without_a_trace(
    train, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        "lightbase.core.run.make_callbacks",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C\n"
    assert not list(tmp_path.iterdir())


class TerminateTest(Callback):
    def on_test_batch_start(self, trainer: Any, *_: Any) -> None:
        Path(trainer.log_dir).with_name("version_1").mkdir()  # a newer run
        signal.raise_signal(signal.SIGINT)


@pytest.mark.linux
def test_ctrl_c_in_the_test_says_how_to_test_again(train, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        train("--trainer.callbacks", "test_training.TerminateTest")
    assert caught.value.code == 130
    command = capsys.readouterr().err.splitlines()[1]
    monkeypatch.setattr(
        TerminateTest, "on_test_batch_start", Callback.on_test_batch_start
    )
    assert script("train").main(command.split()[2:])["steps"] == 38


class Sleep(Callback):
    """Sleeps for a minute in the second step."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        if trainer.global_step == 2:
            print("sleeping", flush=True)
            time.sleep(60)


def begin(
    tmp_path: Path, *args: object, new: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """train.py on tests/tiny.yaml in a process of its own; new: torch is still to be
    imported."""
    command = [sys.executable, "scripts/train.py", "--config", TINY]
    command += ["--trainer.default_root_dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    how = {"cwd": HERE, "env": environment, "stderr": subprocess.PIPE, **options}
    if new:
        return subprocess.Popen([*command, *map(str, args)], text=True, **how)
    return programs.start([*command, *map(str, args)], **how)


@pytest.mark.slow
@pytest.mark.linux
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with begin(
        tmp_path, "--trainer.callbacks", "test_training.Sleep", stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        assert any(line == "sleeping\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().endswith("a second Ctrl-C ends at once\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert process.stderr.read().startswith("Ended by a second Ctrl-C")


@pytest.mark.slow
@pytest.mark.linux
def test_ctrl_c_while_torch_is_imported_has_no_traceback(tmp_path: Path) -> None:
    with begin(tmp_path, new=True, stdout=subprocess.PIPE) as process:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "Stopped by Ctrl-C\n")
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.linux
def test_a_training_goes_on_without_a_reader_of_its_output(tmp_path: Path) -> None:
    bar = ("--trainer.enable_progress_bar", "true")
    with begin(tmp_path, *bar, stdout=subprocess.PIPE) as process:  # train.py | head -1
        assert process.stdout
        assert process.stdout.readline()
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
    assert not errors
    assert process.returncode == 0
    assert (tmp_path / "tiny" / "version_0" / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.linux
def test_sigterm_in_an_accumulation_waits_for_its_step(train, tmp_path, monkeypatch):
    flags = argv(
        "--trainer.accumulate_grad_batches 4 --trainer.callbacks stops.Terminate"
    )
    train(*flags, "--name", "whole")
    monkeypatch.setattr(Terminate, "at_batch", 5)
    with pytest.raises(SystemExit):
        train(*flags, "--name", "cut")
    folders = tmp_path / "whole" / "version_0", tmp_path / "cut" / "version_0"
    assert (
        checkpoint(folders[1])["global_step"] == 5 + 2
    )  # 19 batches are 5 steps; 8 batches 2
    monkeypatch.setattr(Terminate, "at_batch", None)
    train(*flags, "--name", "cut", "--ckpt_path", "last")
    assert equal(*map(weights, folders))


@pytest.mark.linux
def test_sigterm_in_the_last_validation_ends_the_run_before_its_test(
    train, tmp_path, monkeypatch
):
    monkeypatch.setattr(Terminate, "at_batch", 18)
    with pytest.raises(SystemExit) as caught:
        train("--trainer.callbacks", "stops.Terminate")
    assert caught.value.code == 143
    folder = tmp_path / "tiny" / "version_0"
    assert checkpoint(folder)["global_step"] == 38
    assert not (folder / "metrics.json").exists()
    assert train("--ckpt_path", "last")["test/num_samples"] == 75


def test_a_new_run_from_the_middle_of_an_epoch_is_exact_too(
    train: Train, tmp_path: Path
) -> None:
    flags = "--trainer.val_check_interval 0.3 --monitor val/loss --model.lr 0.2"
    train("--trainer.max_epochs 1", flags)
    best = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    step = torch.load(best, weights_only=True)["global_step"]
    assert step % 19 != 0, (
        "the best checkpoint of this test lies in the middle of an epoch"
    )
    before = {
        path: path.read_bytes() for path in best.parents[1].rglob("*") if path.is_file()
    }
    train("--trainer.max_epochs 2", flags, "--ckpt_path", best)
    assert {path: path.read_bytes() for path in before} == before
    train("--trainer.max_epochs 2 --name whole", flags)
    folders = tmp_path / "tiny" / "version_1", tmp_path / "whole" / "version_0"
    assert equal(*map(weights, folders))


def test_a_finished_run_goes_on_with_more_epochs_and_says_so_without(
    train, tmp_path, capsys
):
    first = train()
    again = train("--ckpt_path", "last")
    assert again == {**first, "train_seconds": again["train_seconds"]}
    assert "--trainer.max_epochs 4 would go on" in capsys.readouterr().out
    assert train("--ckpt_path", "last", "--trainer.max_epochs", 3)["epochs"] == 3
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["version_0"]


@pytest.mark.slow
def test_a_moved_run_keeps_its_best_checkpoint(train: Train, tmp_path: Path) -> None:
    train("--trainer.max_epochs", 3)
    (tmp_path / "tiny").rename(tmp_path / "moved")
    folder = tmp_path / "moved" / "version_0"
    best = checkpoint(folder, "best")["epoch"]
    train("--name moved --ckpt_path last --trainer.max_epochs 5")
    assert checkpoint(folder, "best")["epoch"] in range(best, 5)
    state = checkpoint(folder)["callbacks"]["RunCheckpoint/best"]
    assert state["best_model_path"] == str(folder / "checkpoints" / "best.ckpt")


def test_patience_stops_a_run_that_gets_no_better(train: Train) -> None:
    flags = "--trainer.max_epochs 50 --model.lr 1e-9"
    assert train(flags, "--patience 2")["epochs"] == 3
    # the run does not start again without more patience
    assert train(flags, "--patience 2 --ckpt_path last")["epochs"] == 3
    assert train(flags, "--patience 4 --ckpt_path last")["epochs"] == 5
    # by the clock: a validation after every batch
    assert (
        train(flags, "--patience 2 --trainer.val_check_interval 00:00:00:00")["steps"]
        == 3
    )


FLAGS = [
    "--trainer.fast_dev_run true",
    "--trainer.enable_checkpointing false",
    "--trainer.logger false",
    "--trainer.limit_val_batches 0",
    "--trainer.overfit_batches 1 --trainer.log_every_n_steps 1",
    "--trainer.precision bf16-mixed",
    "--trainer.precision 64-true",
    "--model.criterion torch.nn.CrossEntropyLoss --model.criterion.label_smoothing 0.1",
    "--model.optimizer LBFGS --trainer.limit_train_batches 5",
    "--data.num_workers 2",
]
SLOW_FLAGS = [
    "--trainer.callbacks lightning.pytorch.callbacks.LearningRateMonitor",
    "--model.optimizer AdamW --model.optimizer_args.weight_decay 0.1",
]


@pytest.mark.parametrize(
    "flags",
    [*FLAGS, *(pytest.param(flags, marks=pytest.mark.slow) for flags in SLOW_FLAGS)],
)
def test_flags_work_through_to_the_end(
    train: Train, tmp_path: Path, flags: str
) -> None:
    result = train("--trainer.max_epochs 1", flags)
    folder = tmp_path / "tiny" / "version_0"
    if "fast_dev_run" in flags:
        assert result["test/num_samples"] == 16
        assert not list(tmp_path.iterdir())
        return
    assert result["test/num_samples"] == 75
    assert (folder / "metrics.json").exists()
    assert bool(list(folder.glob("events*"))) == ("--trainer.logger" not in flags)
    assert (folder / "checkpoints").exists() == ("enable_checkpointing" not in flags)


@pytest.mark.slow
def test_a_compiled_network_trains_to_the_same_weights_under_the_same_names(
    train, tmp_path
):
    plain = train("--trainer.max_epochs", 1, "--name", "plain")
    compiled = train("--trainer.max_epochs 1 --name compiled --model.compile_net eager")
    assert equal(
        *(weights(tmp_path / name / "version_0") for name in ("plain", "compiled"))
    )
    assert compiled["test/loss"] == plain["test/loss"]
