"""Runs of several processes. Functions without `test_` run on the ranks of `ranks.py`."""

import json
import os
import signal
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from example.classifier import Classifier
from given import Given
from lightning import Callback, LightningModule, Trainer
from paths import TINY, argv, script
from ranks import (
    LIMIT_S,
    assert_none_left,
    children,
    on_ranks,
    start_train,
    two_machines,
    wait_for,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from written import checkpoint, checkpoint_file, equal, weights

from lightbase.commands.train import main
from lightbase.model.curves import run_folder
from lightbase.run.stops import BetweenSteps

pytestmark = pytest.mark.linux


def train(folder, *args):
    main(["--config", TINY, "--trainer.default_root_dir", folder, *args])


def evaluate(*args):
    script("evaluate").main(list(args))


# which samples come where


def numbers(start, num):
    """Samples that are their own numbers, from `start` on."""
    samples = torch.arange(start, start + num)
    return samples.float().unsqueeze(1), samples % 2


class Seen(LightningModule):
    """Notes the numbers of every batch: {stage and epoch: batches}."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 2)
        self.seen = defaultdict(list)

    def note(self, stage, batch):
        self.seen[stage].append(batch[0][:, 0].int().tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_start(self):
        torch.rand(3 * self.global_rank)  # the ranks' generators drift apart

    def training_step(self, batch):
        return self.note(f"train {self.current_epoch}", batch)

    def validation_step(self, batch):
        self.note(f"val {self.current_epoch}", batch)

    def test_step(self, batch):
        self.note("test", batch)

    def predict_step(self, batch):
        self.note("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def look(folder):
    """Fit, test and predict numbers, by a Trainer made by hand. Leaves RANK.json."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(3 + rank)
    samples = {"train": numbers(0, 53), "test": numbers(1000, 25), "batch_size": 4}
    # one rank has a batch more in the validation
    data = Given(**samples, val_fraction=0.17, num_workers=1)
    options = {"max_epochs": 2, "barebones": True, "devices": 2}
    trainer = Trainer(accelerator="cpu", strategy="ddp", **options)
    model = Seen()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    trainer.predict(model, data, return_predictions=False)
    Path(folder, f"{rank}.json").write_text(json.dumps(model.seen))
    torch.distributed.destroy_process_group()


def test_which_samples_each_rank_sees(tmp_path):
    result = on_ranks(tmp_path, 2, "test_distributed.look", tmp_path)
    assert result.statuses == [0, 0], result.outputs
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )

    def together(stage):
        """Of both ranks, sorted."""
        return sorted(chain(*first[stage], *second[stage]))

    for epoch in range(2):
        sizes = [[len(batch) for batch in x[f"train {epoch}"]] for x in (first, second)]
        assert sizes == [[4] * 5] * 2  # only whole batches, and equally many
        trained, val = together(f"train {epoch}"), together(f"val {epoch}")
        assert len({*trained}) == 40
        assert len({*val}) == len(val) == 9
        assert not {*val} & {*trained}
        assert val == together("val 0")
    assert first["train 0"] != first["train 1"]
    for stage in ("test", "predict"):
        assert together(stage) == list(range(1000, 1025)), stage


# whole runs


RUN = Path("tiny", "version_0")
WITH_METRICS = (
    "--model.metrics",
    "{f1: torchmetrics.classification.MulticlassF1Score, "
    "auroc: torchmetrics.classification.MulticlassAUROC}",
)


def metrics_of(folder):
    return json.loads((folder / RUN / "metrics.json").read_text())


def run(folder, num_ranks, *args, status=0):
    """Train; the ranks' outputs."""
    folder.mkdir(exist_ok=True)
    result = on_ranks(folder, num_ranks, "test_distributed.train", folder, *argv(*args))
    assert result.statuses == [status] * num_ranks, "\n".join(result.outputs)
    return result.outputs


class NoteFolder(Callback):
    """Writes into the run's folder on the last rank alone."""

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == trainer.world_size - 1:
            (run_folder(trainer) / "note.txt").write_text("here")


def test_one_folder_and_one_voice(tmp_path):
    first, second = run(tmp_path, 2, "--trainer.callbacks test_distributed.NoteFolder")
    assert second == ""
    assert first.count("Run folder: ") == 1
    (folder,) = (tmp_path / "tiny").iterdir()
    assert (folder / "note.txt").exists()
    assert metrics_of(tmp_path)["test/num_samples"] == 75
    flags = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]
    assert (flags["devices"], flags["strategy"]) == (2, "ddp")  # as the launcher has it


@pytest.mark.slow
def test_test_results_do_not_depend_on_the_number_of_ranks(tmp_path):
    run(tmp_path, 1, *WITH_METRICS)
    trained, reports = metrics_of(tmp_path), set()
    best = ("--ckpt_path", checkpoint_file(tmp_path / RUN), "--data.batch_size 7")
    for num_ranks in (1, 2, 3):
        report = tmp_path / str(num_ranks)
        report.mkdir()
        args = argv(*best, "--report", report, "--trainer.default_root_dir", tmp_path)
        result = on_ranks(tmp_path, num_ranks, "test_distributed.evaluate", *args)
        assert not any(result.statuses), result.outputs
        assert not any(result.outputs[1:])
        names = ("report.csv", "confusion_matrix.csv")
        reports.add("".join((report / name).read_text() for name in names))
        metrics = json.loads(result.outputs[0].splitlines()[-1])
        # unequal shares of 2 and 3 ranks
        assert metrics["test/num_samples"] == 75
        assert {"test/loss", "test/f1", "test/auroc"} <= metrics.keys()
        assert trained == pytest.approx(trained | metrics, rel=1e-5)
    assert len(reports) == 1


@pytest.mark.slow
def test_the_first_rank_watches_and_the_pictures_hold_the_samples_of_all(tmp_path):
    flags = "--step_timer true --device_monitor true --figures_every_n_epochs 1 "
    flags += "--model.lr 1e-12 --trainer.max_epochs 1 --trainer.log_every_n_steps 1"
    pictures = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        shown = run(folder, num_ranks, flags, "--data.batch_size", 32 // num_ranks)
        assert "".join(shown).count("Where the time of training went") == 1
        events = EventAccumulator(str(folder / RUN)).Reload()
        tags = [tag for tag in events.Tags()["images"] if tag.startswith("view/")]
        assert len(tags) == 5
        pictures.append([events.Images(tag)[0].encoded_image_string for tag in tags])
    assert pictures[0] == pictures[1]  # pixel for pixel, as nothing was learned


class Dropout(nn.Sequential):
    """For images (N, 3, 8, 8) of 4 classes: every rank draws random numbers in every
    step."""

    def __init__(self):
        layers = (nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.3), nn.Linear(16, 4))
        super().__init__(*layers)


class Terminate(Callback):
    """Sends a signal to the second rank, in the second epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, i):
        BetweenSteps.every_n_steps = 4
        if (trainer.current_epoch, i, trainer.global_rank) == (1, 2, 1):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_all_ranks_stop_together_at_a_signal_and_go_on(tmp_path):
    flags = "--model test_epoch_start.Scaled --model.net test_distributed.Dropout"
    flags += " --trainer.max_epochs 3 --trainer.callbacks test_epoch_start.SetsFactor"
    args = (flags, *WITH_METRICS)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    run(whole, 2, *args)
    terminate = "--trainer.callbacks+ test_distributed.Terminate"
    outputs = run(cut, 2, *args, terminate, status=128 + signal.SIGTERM)
    assert "Stopped by SIGTERM; to continue:\ntorchrun (or srun) ... " in outputs[0]
    assert not outputs[1]
    assert checkpoint(cut / RUN)["global_step"] == 9 + 4
    run(cut, 2, *args, "--ckpt_path last")
    assert equal(weights(cut / RUN), weights(whole / RUN))


# what goes wrong


class TracksOnOne(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            return super().training_step(batch, batch_idx)
        return self.criterion(self.net(batch[0]), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.batch_size 110", "data.batch_size 110 times 3 processes: only 315"),
        ("--model test_distributed.TracksOnOne", "1 of 3 processes called track()"),
    ],
)
def test_a_mistake_is_told_once(tmp_path, flags, message):
    result = on_ranks(tmp_path, 3, "test_distributed.train", tmp_path, *flags.split())
    assert all(result.statuses)
    text = "".join(result.outputs)
    assert message in text.partition("error: ")[2].partition("\n")[0]
    assert "Traceback" not in text
    assert not list(tmp_path.rglob("*.ckpt"))


class Fail(Callback):
    """Fails on one rank, in the second epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if (trainer.current_epoch, trainer.global_rank) == (1, 1):
            raise ValueError("a bug on rank 1")


def test_a_bug_on_one_rank_ends_the_others_and_keeps_its_traceback(tmp_path):
    fail = ("--trainer.callbacks", "test_distributed.Fail")
    result = on_ranks(tmp_path, 2, "test_distributed.train", tmp_path, *fail)
    assert all(result.statuses)
    assert "ValueError: a bug on rank 1" in result.outputs[1]
    assert len([*tmp_path.rglob("*.ckpt")]) == 2


# the command itself, which starts the other processes

DDP = "--trainer.devices 2 --trainer.strategy"
LONG = f"{DDP} ddp --data.num_train 5000 --trainer.max_epochs 100"


@pytest.mark.slow
def test_strategies_by_flag(tmp_path):
    expected = {}
    for strategy in ("ddp", "ddp_fork", "ddp_spawn"):
        process = start_train(tmp_path / strategy, f"{DDP} {strategy}")
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        assert_none_left(process.pid)
        assert "Device: CPU, processes: 2, threads of each: 1" in output
        assert output.count("Run folder: ") == 1
        assert strategy == "ddp_spawn" or "warn" not in output.lower()
        metrics = metrics_of(tmp_path / strategy) | {"train_seconds": 0}
        expected = expected or metrics
        assert metrics == pytest.approx(expected)
        assert metrics["test/num_samples"] == 75


@pytest.mark.slow
def test_a_killed_rank_ends_the_command(tmp_path):
    process = start_train(tmp_path, LONG)
    wait_for(process, "1/")
    (second,) = children(process)
    os.kill(second, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert_none_left(process.pid)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_all_processes_and_stops_the_command(tmp_path):
    process = start_train(tmp_path, LONG, "--data.num_workers 1")
    wait_for(process, "1/")
    begin = time.monotonic()
    wait_for(process, "2/")
    time.sleep((time.monotonic() - begin) / 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert output.splitlines()[-2] == "Stopped by Ctrl-C; to continue:"
    assert "Traceback" not in output
    assert_none_left(process.pid)
    # in the middle of an epoch
    assert checkpoint(tmp_path / RUN)["global_step"] % (4_500 // 32)


@pytest.mark.slow
def test_two_machines_by_torchrun_train_as_one(tmp_path, trained):
    two_machines(tmp_path, "--data.batch_size 8")
    folder, metrics = trained()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(weights(tmp_path / RUN), weights(folder), **close)
    found = metrics_of(tmp_path)
    expected = metrics | {"train_seconds": found["train_seconds"]}
    assert found == pytest.approx(expected, rel=1e-4)
