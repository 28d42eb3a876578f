"""Whole runs of tiny.yaml through main(args)."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import yaml
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Callback, LightningDataModule, seed_everything
from paths import HERE, TINY, Train, Trained, fails, script
from stops import Interrupt, InterruptedRunError, Terminate
from torch import nn
from torch.utils.data import DataLoader, Dataset
from written import checkpoint, checkpoint_file, curves, equal, weights

from lightbase.data.loader import ResumableLoader
from lightbase.data.sampler import EpochBatchSampler

THREE_EPOCHS = "--trainer.max_epochs 3"
ACCUMULATED = "--trainer.accumulate_grad_batches 3"
STEP_LR = "--model.scheduler StepLR --model.scheduler_args.step_size 1"


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the content of each file of a run but its curves and log.txt, to which a
    failed start may add something."""
    files = [path for path in folder.rglob("*.*") if path.is_file()]
    added = re.compile(r"events\.out\.tfevents|log\.txt")
    return {path: path.read_bytes() for path in files if not added.match(path.name)}


def summary(folder: Path) -> list[Any]:
    """Return the curves, the progress and the weights of a run, for a comparison."""
    progress = json.loads((folder / "progress.json").read_text())
    del progress["train_seconds"]
    found = [curves(folder), progress]
    for name in ("last", "best"):
        found += [value.tolist() for value in weights(folder, name).values()]
    return found


def test_a_run_learns_and_leaves_a_complete_folder(train, tmp_path):
    result = train("--trainer.max_epochs 6 --data.num_train 1000")
    folder = tmp_path / "tiny/version_0"
    assert result["test/acc"] > 0.6  # chance is 0.25
    assert result["test/num_samples"] == 75
    assert (result["epochs"], result["steps"]) == (6, 6 * (900 // 16))
    assert result["train_seconds"] > 0
    assert json.loads((folder / "metrics.json").read_text()) == result
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"best.ckpt", "last.ckpt"}
    assert "git commit: " in (folder / "environment.txt").read_text()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["init_args"]["val_fraction"] == 0.1  # defaults too


def test_the_same_seed_gives_the_same_run_and_another_seed_another_one(
    train, trained, tmp_path
):
    folder, _ = trained()
    train("--seed_everything 42")
    assert summary(tmp_path / "tiny/version_0") == summary(folder)
    train("--seed_everything 2")
    other = curves(tmp_path / "tiny/version_1")
    assert other["train/loss"] != curves(folder)["train/loss"]


def test_a_training_computes_what_a_plain_loop_does(trained: Trained) -> None:
    folder, _ = trained("--trainer.max_epochs 1 --trainer.log_every_n_steps 1")
    found = curves(folder)
    seed_everything(42, workers=True)
    options = yaml.safe_load(Path(TINY).read_text())["data"]["init_args"]
    data, net = SyntheticImages(**options), MLP([192, 16, 4])
    data.setup("fit")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    batches = EpochBatchSampler(315, 16, shuffle=True, drop_last=True, seed=42)
    for step, indices in enumerate(batches):
        x, y = data.splits["train"].__getitems__(indices)
        logits = net(data.normalize(x))
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        acc = (logits.argmax(1) == y).float().mean()
        assert found["train/loss"][step] == (step, pytest.approx(loss.item(), 1e-5))
        assert found["train/acc"][step] == (step, pytest.approx(acc.item()))


LONGER = [
    ("--trainer.max_epochs 1", "--trainer.max_epochs 2"),
    ("--trainer.max_steps 19", "--trainer.max_steps -1"),
]


@pytest.mark.parametrize(
    ("first", "longer"),
    [
        ("--trainer.max_steps 30", "--trainer.max_steps -1"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER),
    ],
)
def test_a_finished_run_goes_on_for_longer_where_it_was(
    train, trained, tmp_path, capsys, first, longer
):
    schedule = f"{STEP_LR} {THREE_EPOCHS}"
    whole, expected = trained(schedule, longer)
    ended = train(schedule, first)
    if "max_epochs" in first:
        again = train("--ckpt_path last")
        assert again == ended | {"train_seconds": again["train_seconds"]}
        assert "--trainer.max_epochs 2 trains more" in capsys.readouterr().out
    result = train("--ckpt_path last", longer)
    assert result | {"train_seconds": 0} == expected | {"train_seconds": 0}
    assert not (tmp_path / "tiny/version_1").exists()
    assert equal(weights(tmp_path / "tiny/version_0"), weights(whole))


def test_the_last_of_max_steps_is_validated(train, tmp_path):
    train("--trainer.max_steps 30")
    folder = tmp_path / "tiny" / "version_0"
    assert curves(folder)["val/acc"][-1][0] == 29
    assert checkpoint(folder, "best")["global_step"] == 30


def test_a_schedule_that_is_made_for_a_length_refuses_another_one(
    train, tmp_path, capsys
):
    flags = "--model.scheduler OneCycleLR --trainer.max_epochs"
    train(flags, 1)
    before = contents(tmp_path)
    error = fails(capsys, 2, lambda: train(flags, 3, "--ckpt_path last"))
    assert "model.scheduler OneCycleLR is made for" in error
    assert contents(tmp_path) == before


def test_the_length_of_the_schedule_heeds_max_steps(trained: Trained) -> None:
    flags = "--model.scheduler CosineAnnealingLR --trainer.max_epochs -1"
    folder, _ = trained(flags, "--trainer.max_steps 38 --trainer.log_every_n_steps 1")
    rates = [value for _, value in curves(folder)["lr"]]
    assert rates == pytest.approx([0.01] * 19 + [0.005] * 19)


class Noisy(nn.Sequential):
    """A network with dropout, whose random numbers must go on where they were."""

    def __init__(self) -> None:
        layers = (nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        super().__init__(*layers)


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


RESUMES = [
    "--data.num_workers 2 --model.scheduler FinalDecayLR "
    f"--model.scheduler_interval step {ACCUMULATED}",
    "--model.scheduler ReduceLROnPlateau --model.scheduler_args.patience 0 "
    "--trainer.val_check_interval 0.3",
    f"--trainer.check_val_every_n_epoch 2 {ACCUMULATED} {STEP_LR}",
    "--trainer.limit_val_batches 0",
]


@pytest.mark.parametrize(
    "flags",
    [
        "--model.net test_training.Noisy --model.scheduler WarmupCosineLR "
        "--model.scheduler_interval step",
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in RESUMES),
    ],
)
def test_a_resumed_run_ends_with_the_weights_and_curves_of_an_uninterrupted_one(
    train, trained, tmp_path, monkeypatch, flags
):
    flags += " --trainer.max_epochs 4"
    whole, expected = trained(flags)
    flags += " --trainer.callbacks stops.Interrupt"
    monkeypatch.setattr(Interrupt, "at_epoch", 2)
    with pytest.raises(InterruptedRunError):
        train(flags)
    monkeypatch.setattr(Interrupt, "at_epoch", None)
    resumed = train(flags, "--ckpt_path last")
    assert not (tmp_path / "tiny/version_1").exists()
    assert summary(tmp_path / "tiny/version_0") == summary(whole)
    assert resumed | {"train_seconds": 0} == expected | {"train_seconds": 0}


SIGNALS = [
    # after the last batch of an epoch, the checkpoint of the epoch has the state
    (THREE_EPOCHS, 18, "SIGTERM", 38),
    # a validation follows: it stops after the next step
    (f"{THREE_EPOCHS} --trainer.val_check_interval 4", 7, "SIGTERM", 28),
    # one batch in each epoch
    (f"{THREE_EPOCHS} --trainer.limit_train_batches 1", 0, "SIGINT", 2),
    # 19 batches are 5 steps; 8 batches 2
    ("--trainer.accumulate_grad_batches 4", 5, "SIGTERM", 7),
    (
        f"{THREE_EPOCHS} --data test_training.OurLoader --model.net "
        "test_training.Noisy --model.scheduler CosineAnnealingLR",
        *(7, "SIGTERM", 20),
    ),
]
"""Flags, the batch of the second epoch, the signal and the steps until the end."""


@pytest.mark.parametrize(
    ("flags", "at_batch", "name", "num_steps"),
    [
        (THREE_EPOCHS, 7, "SIGTERM", 27),
        # after the last batch come a validation, and no test
        ("--trainer.max_epochs 2", 18, "SIGHUP", 38),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SIGNALS),
    ],
)
@pytest.mark.linux
def test_a_signal_keeps_the_state_between_two_batches(
    train, trained, tmp_path, monkeypatch, capsys, flags, at_batch, name, num_steps
):
    whole, _ = trained(flags)
    capsys.readouterr()
    number = signal.Signals[name]
    monkeypatch.setattr(Terminate, "at_batch", at_batch)
    monkeypatch.setattr(Terminate, "number", number)
    handlers = list(map(signal.getsignal, signal.valid_signals()))
    with pytest.raises(SystemExit) as caught:
        train(flags, "--trainer.callbacks stops.Terminate")
    assert caught.value.code == 128 + number
    line, command = capsys.readouterr().err.splitlines()
    assert line == f"Stopped by {name}; to continue:".replace("SIGINT", "Ctrl-C")
    assert list(map(signal.getsignal, signal.valid_signals())) == handlers
    folder = tmp_path / "tiny/version_0"
    assert checkpoint(folder)["global_step"] == num_steps
    assert not (folder / "metrics.json").exists()
    monkeypatch.setattr(Terminate, "at_batch", None)
    script("train").main(command.split()[2:])
    assert summary(folder) == summary(whole)


@pytest.mark.linux
def test_a_signal_before_the_training_ends_it_without_a_trace(
    train, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        "lightbase.commands.train.make_callbacks",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.linux
def test_ctrl_c_in_the_test_says_how_to_test_again(train, monkeypatch, capsys):
    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("example.classifier.Classifier.test_step", stop)
        with pytest.raises(SystemExit) as caught:
            train()
    assert caught.value.code == 130
    command = capsys.readouterr().err.splitlines()[1]
    assert script("train").main(command.split()[2:])["steps"] == 38


class Wait(Callback):
    """Waits in the third step until a file is there."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            print("waiting", flush=True)
            programs.wait_for_file(self.file)


def begin(tmp_path: Path, flags: str) -> Any:
    """Start train.py on tiny.yaml in a new process, in a session of its own."""
    command = [sys.executable, "scripts/train.py", "--config", TINY, *flags.split()]
    command += ["--trainer.default_root_dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return programs.start(
        command, cwd=HERE, env=environment, start_new_session=True, **pipes
    )


WAIT = "--trainer.callbacks test_training.Wait --trainer.callbacks.file"


@pytest.mark.slow
@pytest.mark.linux
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with begin(tmp_path, f"{WAIT} {tmp_path / 'never'}") as process:
        assert "waiting\n" in process.stdout
        process.send_signal(signal.SIGINT)
        assert "a second Ctrl-C ends at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(programs.LIMIT_S) == -signal.SIGINT
        assert not process.stderr.read()


@pytest.mark.slow
@pytest.mark.linux
def test_sigterm_to_all_processes_of_a_command_keeps_the_state(tmp_path: Path) -> None:
    file = tmp_path / "sent"
    with begin(tmp_path, f"--data.num_workers 2 {WAIT} {file}") as process:
        assert "waiting\n" in process.stdout
        os.killpg(process.pid, signal.SIGTERM)
        file.touch()
        _, errors = process.communicate(timeout=programs.LIMIT_S)
    assert process.returncode == 143
    assert errors.startswith("Stopped by SIGTERM; to continue:\n")
    assert checkpoint(tmp_path / "tiny/version_0")["global_step"] == 3


@pytest.mark.slow
@pytest.mark.linux
def test_a_training_goes_on_without_a_reader_of_its_output(tmp_path: Path) -> None:
    with begin(tmp_path, "--trainer.enable_progress_bar true") as process:
        assert process.stdout.readline()
        process.stdout.close()  # train.py | head -1
        assert not process.stderr.read()
    assert process.returncode == 0
    assert (tmp_path / "tiny/version_0" / "metrics.json").exists()


def test_a_new_run_from_the_middle_of_an_epoch_is_exact_too(train, trained, tmp_path):
    flags = "--trainer.val_check_interval 0.3 --monitor val/loss --model.lr 0.2"
    whole, _ = trained(flags, "--trainer.max_epochs 2")
    train("--trainer.max_epochs 1", flags)
    folder = tmp_path / "tiny/version_0"
    assert checkpoint(folder, "best")["global_step"] % 19, "the flags of this test"
    before = contents(folder)
    train("--trainer.max_epochs 2", flags, "--ckpt_path", checkpoint_file(folder))
    assert contents(folder) == before
    assert equal(weights(tmp_path / "tiny/version_1"), weights(whole))


@pytest.mark.slow
def test_a_moved_run_keeps_its_best_checkpoint(train: Train, tmp_path: Path) -> None:
    train("--trainer.max_epochs 2")
    (tmp_path / "tiny").rename(tmp_path / "moved")
    folder = tmp_path / "moved/version_0"
    best = checkpoint(folder, "best")["epoch"]
    train("--name moved --ckpt_path last --trainer.max_epochs 3")
    assert checkpoint(folder, "best")["epoch"] in range(best, 3)
    state = checkpoint(folder)["callbacks"]["RunCheckpoint/best"]
    assert state["best_model_path"] == str(checkpoint_file(folder))


def test_patience_stops_a_run_that_gets_no_better(train: Train) -> None:
    flags = "--trainer.max_epochs 50 --model.lr 1e-9"
    assert train(flags, "--patience 2")["epochs"] == 3
    # the run does not start again without more patience
    assert train(flags, "--patience 2 --ckpt_path last")["epochs"] == 3
    assert train(flags, "--patience 4 --ckpt_path last")["epochs"] == 5
    # by the clock: a validation after every batch
    flags += " --patience 2 --trainer.val_check_interval 00:00:00:00"
    assert train(flags)["steps"] == 3


@pytest.mark.parametrize(
    "flags",
    [
        "--trainer.enable_checkpointing false --trainer.log_every_n_steps 0",
        "--trainer.logger false",
        "--trainer.limit_val_batches 0 --trainer.precision bf16-mixed",
        "--trainer.overfit_batches 1 --trainer.log_every_n_steps 1",
        "--data.val_fraction 0 --trainer.val_check_interval 5",
        "--model.optimizer LBFGS --trainer.limit_train_batches 5",
    ],
)
def test_flags_work_through_to_the_end(
    train: Train, tmp_path: Path, flags: str
) -> None:
    watched = "--figures_every_n_epochs 1 --step_timer true --device_monitor true"
    result = train("--trainer.max_epochs 1", watched, flags)
    folder = tmp_path / "tiny/version_0"
    assert result["test/num_samples"] == 75
    assert (folder / "metrics.json").exists()
    assert any(folder.glob("events*")) == ("--trainer.logger" not in flags)
    assert (folder / "checkpoints").exists() == ("enable_checkpointing" not in flags)


def test_fast_dev_run_leaves_no_file(train: Train, tmp_path: Path) -> None:
    assert train("--trainer.fast_dev_run true")["test/num_samples"] == 16
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_compiled_network_trains_to_the_same_weights_under_the_same_names(trained):
    plain, expected = trained("--trainer.max_epochs 1")
    compiled, result = trained("--trainer.max_epochs 1 --model.compile_net eager")
    assert equal(weights(compiled), weights(plain))
    assert result["test/loss"] == expected["test/loss"]
