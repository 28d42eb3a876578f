"""Runs with long epochs: last.ckpt in the middle of an epoch, and what is left of a run
that ended badly."""

import errno
import json
import operator
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from paths import TINY, argv, fails, script
from plain import PlainData, PlainModule
from stops import Interrupt, InterruptedRunError
from torch.utils.data import Dataset
from written import checkpoint, checkpoint_file, curves, equal, weights

from lightbase.config.errors import UserError
from lightbase.data.module import BaseDataModule
from lightbase.run import checkpoint as checkpoint_files
from lightbase.run.checkpoint import RunCheckpoint
from lightbase.watch.log import LogFile

HERE = "test_long_runs"
ALWAYS = "--checkpoint_minutes 1e-9"  # after each step
INTERRUPTED = "--trainer.callbacks stops.Interrupt"
SLOW = f"--trainer.callbacks+ {HERE}.Slow"
EVERY_3 = (
    "--trainer.callbacks+ ModelCheckpoint --trainer.callbacks.every_n_train_steps 3 "
    "--trainer.callbacks.save_top_k -1 --trainer.callbacks.filename {step}"
)


def progress(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "progress.json").read_text())
    return content


def interrupt(train, monkeypatch, epoch, *flags):
    """Train until an error after eight batches of an epoch, as if the run was killed:
    nothing more is saved."""
    monkeypatch.setattr(Interrupt, "at_epoch", epoch)
    with pytest.raises(InterruptedRunError):
        train(INTERRUPTED, *flags)
    monkeypatch.setattr(Interrupt, "at_epoch", None)


def test_last_ckpt_is_due_after_minutes_of_training() -> None:
    last = RunCheckpoint(Path(), "last", minutes=10)
    assert not last.is_due()  # no training
    for seconds, is_due in ((599, False), (601, True)):
        last.tried_at = time.monotonic() - seconds
        assert last.is_due() == is_due
    last.minutes = 0
    assert not last.is_due()


KILLED = [
    ("--trainer.accumulate_grad_batches 3 --keep_every_epoch true", 2),
    ("--trainer.val_check_interval 4 --data.num_workers 2", 7),
]


@pytest.mark.parametrize(
    ("flags", "num_steps"),
    [
        ("--model.net test_training.Noisy --model.scheduler WarmupCosineLR", 7),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in KILLED),
    ],
)
def test_a_run_that_is_killed_in_its_first_epoch_loses_what_came_after_last_ckpt(
    train, trained, tmp_path, monkeypatch, flags, num_steps
):
    """Step 8 has not ended. Of two validations within an epoch the second follows."""
    flags += " --trainer.log_every_n_steps 2"
    whole, expected = trained(flags)
    interrupt(train, monkeypatch, 0, flags, ALWAYS)
    folder = tmp_path / "tiny" / "version_0"
    assert checkpoint(folder)["global_step"] == num_steps
    result = train("--ckpt_path last", INTERRUPTED)
    assert result | {"train_seconds": 0} == expected | {"train_seconds": 0}
    for name in ("last", "best"):
        assert equal(weights(folder, name), weights(whole, name))
    assert curves(folder) == curves(whole)


class ReadsProgress(Callback):
    """Notes the steps in progress.json before each batch but the first."""

    steps: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx:
            self.steps.append(progress(Path(trainer.log_dir))["steps"])


def test_progress_json_follows_last_ckpt_within_an_epoch(train):
    ReadsProgress.steps.clear()
    train(f"--trainer.callbacks {HERE}.ReadsProgress --trainer.max_epochs 1", ALWAYS)
    num = len(ReadsProgress.steps)
    assert num > 3
    assert ReadsProgress.steps == [*range(1, num + 1)]


def test_zero_minutes_leave_last_ckpt_to_the_end_of_the_epoch(
    train, tmp_path, monkeypatch
):
    for minutes in ("0", "10"):
        interrupt(train, monkeypatch, 0, "--checkpoint_minutes", minutes)
    assert not [*tmp_path.rglob("*.ckpt")]


class EpochMean(PlainModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("model", "data"),
    [("plain.PlainModule", "plain.PlainData"), (f"{HERE}.EpochMean", "OurLoader")],
)
def test_where_a_resume_is_not_exact_a_line_says_that_the_epoch_is_the_unit(
    train, tmp_path, monkeypatch, capsys, model, data
):
    config = tmp_path / "plain.yaml"
    data = data.replace("OurLoader", f"{HERE}.ResumableSums")
    config.write_text(f"name: tiny\nmodel: {model}\ndata: {data}\n")
    flags = f"{ALWAYS} --monitor null --trainer.accelerator cpu --step_timer false"
    monkeypatch.setattr(Interrupt, "at_epoch", 1)
    with pytest.raises(InterruptedRunError):
        train(flags, INTERRUPTED, config=str(config))
    saved = checkpoint(tmp_path / "tiny" / "version_0")
    assert saved["global_step"] == len(PlainData().train_dataloader())
    line = "last.ckpt is written at the end of an epoch only"
    assert capsys.readouterr().out.count(line) == 1


class ResumableSums(PlainData):
    def train_dataloader(self):
        from lightbase.data.loader import ResumableLoader
        from lightbase.data.sampler import EpochBatchSampler

        dataset = super().train_dataloader().dataset
        return ResumableLoader(dataset, EpochBatchSampler(150, 8, shuffle=True))


def test_a_write_that_fails_within_an_epoch_is_a_line(
    train, tmp_path, monkeypatch, capsys
):
    write = checkpoint_files.write_whole
    times = []

    def fail_first(path, *args):
        times.append(time.monotonic())
        if len(times) in (2, 3):
            full = OSError(errno.ENOSPC, "No space left on device")
            raise UserError(f"{path} cannot be written: {full.strerror}") from full
        write(path, *args)

    monkeypatch.setattr(checkpoint_files, "write_whole", fail_first)
    interrupt(train, monkeypatch, 0, ALWAYS)
    printed = capsys.readouterr().out
    assert printed.count("No space left on device; the training goes on\n") == 2
    assert checkpoint(tmp_path / "tiny" / "version_0")["global_step"] == 7
    del times[1:]  # the second one fails again, and a third one is not due
    interrupt(train, monkeypatch, 0, "--checkpoint_minutes 0.003", SLOW)
    assert len(times) > 3
    assert min(map(operator.sub, times[2:], times[1:])) > 0.003 * 60


def test_devices_stay_within_an_epoch_and_the_message_says_how_to_go_on(
    train, monkeypatch, capsys
):
    interrupt(train, monkeypatch, 0, ALWAYS)
    resume = lambda: train("--ckpt_path last --trainer.devices 2")  # noqa: E731
    error = fails(capsys, 2, resume)
    assert "in the middle of an epoch" in error


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning, of a new run
def test_the_newest_file_of_a_modelcheckpoint_continues_its_run(
    train, trained, tmp_path, monkeypatch
):
    whole, _ = trained("--trainer.log_every_n_steps 1")
    interrupt(train, monkeypatch, 0, "--trainer.log_every_n_steps 1", EVERY_3)
    folder = tmp_path / "tiny" / "version_0"
    file = checkpoint_file(folder, "step=6")
    script("train").main(["--ckpt_path", str(file)])
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    assert equal(weights(folder), weights(whole))
    assert curves(folder) == curves(whole)
    # last.ckpt is newer now: to go back is a new run
    script("train").main(["--ckpt_path", str(file)])
    assert (folder.parent / "version_1" / "metrics.json").exists()


class Fails(Callback):
    """Prints, warns and fails after the seventh step of the first epoch."""

    is_on = True

    def on_train_batch_end(self, trainer, *_):
        if self.is_on and trainer.global_step == 7:
            print("begun ", end="")
            print("and ended")
            print("to stderr", file=sys.stderr)
            raise ZeroDivisionError("of the user")


def test_what_is_left_of_a_run_that_failed_in_its_first_epoch(
    train, tmp_path, monkeypatch, capsys
):
    flags = f"--trainer.callbacks {HERE}.Fails --trainer.enable_progress_bar true"
    streams = sys.stdout.write, sys.stderr.write
    with pytest.raises(ZeroDivisionError):
        train(flags, "--trainer.log_every_n_steps 2")
    assert (sys.stdout.write, sys.stderr.write) == streams
    folder = tmp_path / "tiny" / "version_0"
    assert [step for step, _ in curves(folder)["train/loss"]] == [1, 3, 5]
    assert progress(folder)["failed"] == "ZeroDivisionError: of the user"
    assert progress(folder)["steps"] == 7
    log = (folder / "log.txt").read_text()
    assert "\r" not in log
    lines = log.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    texts = [line[20:] for line in lines]
    for text in ("to stderr", "ZeroDivisionError: of the user"):
        assert text in texts
    assert any(text.endswith("begun and ended") for text in texts)
    assert any(text.startswith("Traceback") for text in texts)
    assert texts[0].startswith("Data: ")
    assert "to stderr" in capsys.readouterr().err
    root = ["--trainer.default_root_dir", str(tmp_path)]
    script("runs").main(root)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[2] == "status"
    assert row.split()[2] == "failed"
    assert row.endswith("  ZeroDivisionError: of the user")
    monkeypatch.setattr(Fails, "is_on", False)
    train("--ckpt_path last")
    assert "failed" not in progress(folder)
    both = (folder / "log.txt").read_text()
    assert both.startswith(log)
    assert both[len(log) + 20 :].startswith(f"{folder} was stopped before")
    assert f"Run folder: {folder}\n" in both
    capsys.readouterr()
    script("runs").main(root)
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "finished"


class Slow(Callback):
    def on_train_batch_start(self, *_):
        time.sleep(0.1)


class FailsAtOnce(Callback):
    def on_train_batch_start(self, *_):
        raise ZeroDivisionError


def test_a_run_without_a_step_leaves_nothing(train, tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(f"--trainer.callbacks {HERE}.FailsAtOnce")
    assert not [*tmp_path.iterdir()]


class TrainsAnother(Callback):
    """Trains another run after the first epoch, as a search may."""

    def on_train_epoch_end(self, trainer, *_):
        if trainer.current_epoch == 0 and trainer.max_epochs == 2:
            root = ["--trainer.default_root_dir", trainer.default_root_dir]
            small = argv("--name inner --trainer.max_epochs 1")
            script("train").main(["--config", TINY, *root, *small])


def test_a_run_within_a_run_leaves_its_log_whole(train, tmp_path):
    train(f"--trainer.callbacks {HERE}.TrainsAnother")
    outer, inner = (tmp_path / name / "version_0" for name in ("tiny", "inner"))
    assert f"Run folder: {outer}\n" in (outer / "log.txt").read_text()
    assert "Run folder" in (inner / "log.txt").read_text()
    assert str(outer) not in (inner / "log.txt").read_text()


def test_what_a_progress_bar_draws_again_is_not_in_the_log(tmp_path, capsys):
    log = LogFile()
    log.add("zero\n")
    log.path = tmp_path / "log.txt"
    shown = []
    for text in ("one", "\r 50 %", " line\n", "\r      \r", "two\nthree\nfour"):
        log.copy(shown.append, text)
    assert "".join(shown) == "one\r 50 % line\n\r      \rtwo\nthree\nfour"
    lines = log.path.read_text().splitlines()
    assert [line[20:] for line in lines] == ["zero", "one line", "two", "three"]
    log.path = tmp_path  # a folder cannot be written, as a full disk
    log.add("five\n")
    log.add("six\n")
    assert capsys.readouterr().out.count("log.txt cannot be written") == 1


class Growing(BaseDataModule):
    """A Dataset of 40 samples that grows by 40 in each epoch."""

    classes = ["left", "right"]

    def load(self, split):
        num = {"train": 40, "test": 8}[split]
        samples = [(torch.randn(3), i % 2) for i in range(num)]
        if split == "train":
            self.samples = samples
        return Listed(samples)


class Listed(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Grows(Callback):
    num_batches: list[int] = []

    def on_train_epoch_end(self, trainer, *_):
        self.num_batches.append(trainer.num_training_batches)
        trainer.datamodule.samples.extend(trainer.datamodule.samples[:40])


@pytest.mark.parametrize(("every", "expected"), [(0, [5, 5]), (1, [5, 10])])
def test_a_new_loader_each_epoch_reads_all_of_a_dataset_that_grows(
    tmp_path, monkeypatch, every, expected
):
    monkeypatch.setattr(Grows, "num_batches", [])
    config = tmp_path / "growing.yaml"
    config.write_text(
        f"name: tiny\nmodel: {{net: {{class_path: MLP, init_args: {{sizes: [3, 2]}}}}}}\n"
        f"data: {{class_path: {HERE}.Growing, init_args: {{val_fraction: 0}}}}\n"
    )
    flags = "--data.batch_size 8 --trainer.max_epochs 2 --trainer.accelerator cpu"
    flags += f" --trainer.callbacks {HERE}.Grows --test false --step_timer false"
    flags += f" --trainer.reload_dataloaders_every_n_epochs {every}"
    root = ["--trainer.default_root_dir", str(tmp_path)]
    script("train").main(["--config", str(config), *root, *flags.split()])
    assert Grows.num_batches == expected
