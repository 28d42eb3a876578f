"""Runs of several processes. Functions without `test_` run on the ranks of
`tests/ranks.py`."""

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import programs
import pytest
import ranks
import torch
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from paths import HERE, TINY, script
from ranks import Ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from written import checkpoint, checkpoint_file, curves, equal, weights

from lightbase.commands.train import main
from lightbase.core import signals
from lightbase.core.callbacks import StopOnSignal
from lightbase.core.curves import run_folder
from lightbase.core.data import BaseDataModule, Batch

RunRanks = Callable[..., Ranks]


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    if sys.platform != "linux":
        pytest.skip("forks processes that use torch")
    return functools.partial(ranks.on_ranks, tmp_path_factory.mktemp("ranks"))


def train(folder: str, *args: Any) -> None:
    main(["--config", TINY, "--trainer.default_root_dir", folder, *map(str, args)])


def evaluate(*args: Any) -> None:
    script("evaluate").main(list(map(str, args)))


# which samples come where


class Numbers(BaseDataModule):
    """Samples that are their own numbers: 0 up to num_train, and from 1000 up to 1000 +
    num_test."""

    classes = ["a", "b"]

    def __init__(self, num_train: int = 53, num_test: int = 25, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num = {"train": num_train, "test": num_test}

    def load(self, split: Literal["train", "test"]) -> Any:
        start = 0 if split == "train" else 1000
        numbers = torch.arange(start, start + self.num[split])
        return numbers.float().unsqueeze(1), numbers % 2


class Numbered(Dataset[Any]):
    """The numbers from `start` on."""

    def __init__(self, start: int, num: int) -> None:
        self.start = start
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([float(self.start + i)]), i % 2


class PlainNumbers(LightningDataModule):
    """The same by torch's own loaders, which know nothing of ranks."""

    def loader(self, start: int, num: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(Numbered(start, num), batch_size=4, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(0, 48, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(48, 5)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(1000, 25)

    predict_dataloader = test_dataloader


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.zeros(3, 8, 8), 0) for _ in range(32))


class StreamedImages(SyntheticImages):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=16)


class WithBuffer(nn.Module):
    """A network with a buffer: DDP exchanges it in every forward, also where the ranks
    have unequally many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.linear(x)


class Seen(LightningModule):
    """Notes the numbers of every batch: {stage and epoch: batches}."""

    def __init__(self) -> None:
        super().__init__()
        self.net = WithBuffer()
        self.seen: dict[str, list[list[int]]] = defaultdict(list)

    def note(self, stage: str, batch: Batch) -> Tensor:
        epoch = 0 if stage in ("test", "predict") else self.current_epoch
        self.seen[f"{stage} {epoch}"].append(batch[0][:, 0].int().tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_start(self) -> None:
        torch.rand(3 * self.global_rank)  # the ranks' generators drift apart

    def training_step(self, batch: Batch) -> Tensor:
        return self.note("train", batch)

    def validation_step(self, batch: Batch) -> None:
        self.note("val", batch)

    def test_step(self, batch: Batch) -> None:
        self.note("test", batch)

    def predict_step(self, batch: Batch) -> None:
        self.note("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def look(
    folder: str, data_options: dict[str, Any] | None, seed: int | None = None
) -> None:
    """Fit, test and predict Numbers, or PlainNumbers, by a Trainer made by hand; leaves
    seen_RANK.json."""
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    torch.manual_seed(seed)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        barebones=True,
    )
    data: Any = PlainNumbers()
    if data_options is not None:
        data = Numbers(batch_size=4, **data_options)
    model = Seen()

    trainer.fit(model, data)
    loader: Any = trainer.train_dataloader
    trainer.test(model, data, verbose=False)
    trainer.predict(model, data, return_predictions=False)
    notes = {**model.seen, "sampler": type(loader.sampler).__name__}
    Path(folder, f"seen_{trainer.global_rank}.json").write_text(json.dumps(notes))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def seen(
    on_ranks: RunRanks, num_ranks: int, folder: Path, *args: Any
) -> list[dict[str, Any]]:
    """What each rank has noted in `look`."""
    result = on_ranks(num_ranks, "test_distributed.look", folder, *args)
    assert result.statuses == [0] * num_ranks, result.outputs
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen_*"))]


def together(notes: list[dict[str, Any]], stage: str, epoch: int) -> list[int]:
    """The numbers that all ranks saw in an epoch."""
    return list(chain(*chain(*(rank[f"{stage} {epoch}"] for rank in notes))))


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        # one rank has a batch more in the validation
        (3, {"val_fraction": 0.17}),
        (2, {"val_fraction": 0.25, "num_workers": 1, "drop_last": False}),
    ],
)
def test_which_samples_each_rank_sees(on_ranks, tmp_path, num_ranks, options):
    seed = None if "num_workers" in options else 3
    notes = seen(on_ranks, num_ranks, tmp_path, options, seed)

    num_val = round(53 * options.get("val_fraction", 0.1))
    num_train = 53 - num_val
    orders = []
    for epoch in range(2):
        batches = [rank[f"train {epoch}"] for rank in notes]
        assert len({len(own) for own in batches}) == 1  # equally many steps
        numbers = together(notes, "train", epoch)
        assert len({*numbers}) == len(numbers)
        if options.get("drop_last", True):
            assert {len(batch) for batch in chain(*batches)} == {4}
            assert len(numbers) == num_train // (4 * num_ranks) * 4 * num_ranks
        else:
            assert len(numbers) == num_train // num_ranks * num_ranks
        val = together(notes, "val", epoch)
        assert len(val) == num_val
        assert not set(val) & set(numbers)
        assert sorted(val) == sorted(together(notes, "val", 0))
        orders.append(batches)
    assert orders[0] != orders[1]
    for stage in ("test", "predict"):
        assert sorted(together(notes, stage, 0)) == list(range(1000, 1025)), stage


def test_a_stock_loader_is_shared_out_once(on_ranks, tmp_path):
    notes = seen(on_ranks, 2, tmp_path, None, 3)
    assert [rank["sampler"] for rank in notes] == ["DistributedSampler"] * 2
    orders = [together(notes, "train", epoch) for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(48))
    assert orders[0] != orders[1]
    assert set(together(notes, "val", 0)) == set(range(48, 53))
    assert set(together(notes, "test", 0)) == set(range(1000, 1025))
    # Lightning's sampler gives one twice, to make the shares equal
    assert len(together(notes, "test", 0)) == 26


def test_each_process_trains_on_all_of_an_iterable_dataset_and_a_line_says_so(
    on_ranks, tmp_path
):
    outputs = run(on_ranks, 2, tmp_path, "--data", "test_distributed.StreamedImages")
    assert "and each trains on all of an IterableDataset" in outputs[0]


# whole runs


RUN = Path("tiny", "version_0")


def curve(folder: Path, tag: str) -> dict[int, float]:
    """Step to value."""
    return dict(curves(folder / RUN)[tag])


def metrics_of(folder: Path) -> dict[str, float]:
    return json.loads((folder / RUN / "metrics.json").read_text())  # type: ignore[no-any-return]


def run(
    on_ranks: RunRanks, num_ranks: int, folder: Path, *args: Any, status: int = 0
) -> list[str]:
    """Train; the ranks' outputs."""
    result = on_ranks(num_ranks, "test_distributed.train", folder, *args)
    assert result.statuses == [status] * num_ranks, "\n".join(result.outputs)
    return result.outputs


WITH_METRICS = (
    "--model.metrics",
    "{f1: torchmetrics.classification.MulticlassF1Score, "
    "auroc: torchmetrics.classification.MulticlassAUROC}",
)
TAGS = ("train/loss", "train/f1", "train/auroc", "val/loss", "val/f1", "val/auroc")


@pytest.mark.slow
def test_two_ranks_follow_one_process_with_twice_the_batch(on_ranks, tmp_path):
    flags = "--trainer.max_epochs 3 --trainer.accumulate_grad_batches 2"
    args = (*flags.split(), *WITH_METRICS)
    for num_ranks, batch_size in ((1, 32), (2, 16)):
        folder = tmp_path / str(num_ranks)
        run(on_ranks, num_ranks, folder, "--data.batch_size", batch_size, *args)
    torch.testing.assert_close(
        weights(tmp_path / "2" / RUN),
        weights(tmp_path / "1" / RUN),
        rtol=1e-4,
        atol=1e-5,
    )
    for tag in (*TAGS, "lr", "test/loss", "test/auroc"):
        expected = curve(tmp_path / "1", tag)
        assert curve(tmp_path / "2", tag) == pytest.approx(expected, rel=1e-4), tag
    assert len(curve(tmp_path / "1", "train/loss")) > 1


class NoteFolder(Callback):
    """Writes into the run's folder on the last rank alone."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            (run_folder(trainer) / "note.txt").write_text("here")


def test_one_folder_and_one_voice(on_ranks: RunRanks, tmp_path: Path) -> None:
    callback = ("--trainer.callbacks", "test_distributed.NoteFolder")
    first, second = run(on_ranks, 2, tmp_path, *callback)
    assert second == ""
    words = "Data Network Best Device Curves Epoch Epoch Trained Test Run"
    assert [
        line.split(":")[0].split(" ")[0] for line in first.splitlines()
    ] == words.split()
    (folder,) = (tmp_path / "tiny").iterdir()
    files = "checkpoints config.yaml environment.txt hparams.yaml metrics.json note.txt"
    files += " progress.json"
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {*files.split()}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
    }
    assert metrics_of(tmp_path)["test/num_samples"] == 75
    flags = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]
    assert (flags["devices"], flags["strategy"]) == (2, "ddp")  # as the launcher has it


def test_test_results_do_not_depend_on_the_number_of_ranks(on_ranks, tmp_path):
    run(on_ranks, 1, tmp_path, *WITH_METRICS)
    best = checkpoint_file(tmp_path / RUN)
    trained = metrics_of(tmp_path)
    reports = []
    for num_ranks in (1, 2, 3):
        report = tmp_path / str(num_ranks)
        report.mkdir()
        flags = ("--ckpt_path", best, "--data.batch_size", 7, "--report", report)
        flags += ("--trainer.default_root_dir", tmp_path)
        result = on_ranks(num_ranks, "test_distributed.evaluate", *flags)
        assert not any(result.statuses), result.outputs
        names = ("report.csv", "confusion_matrix.csv")
        reports.append([(report / name).read_text() for name in names])
        metrics = json.loads(result.outputs[0].splitlines()[-1])
        assert metrics == pytest.approx(
            {name: trained[name] for name in metrics}, rel=1e-5
        )
        assert {"test/loss", "test/f1", "test/auroc"} <= metrics.keys()
        assert metrics["test/num_samples"] == 75  # unequal shares of 2 and 3 ranks
        assert not any(result.outputs[1:])
    assert reports[0] == reports[1] == reports[2]


class Dropout(nn.Sequential):
    """For images (N, 3, 8, 8) of 4 classes: every rank draws random numbers in every
    step."""

    def __init__(self) -> None:
        layers = (nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.3), nn.Linear(16, 4))
        super().__init__(*layers)


DROPOUT = (
    *("--model.net", "test_distributed.Dropout", *WITH_METRICS),
    *("--trainer.max_epochs", 3, "--trainer.log_every_n_steps", 3),
)


@pytest.mark.slow
def test_the_first_rank_watches_and_the_pictures_hold_the_samples_of_all(
    on_ranks, tmp_path
):
    watched = "--step_timer true --device_monitor true --figures_every_n_epochs 1"
    rest = "--model.lr 1e-12 --trainer.max_epochs 1 --trainer.log_every_n_steps 1"
    flags = (*watched.split(), *rest.split())
    pictures = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        shown = run(
            on_ranks, num_ranks, folder, *flags, "--data.batch_size", 32 // num_ranks
        )
        assert sum("Where the time of training went" in text for text in shown) == 1
        events = EventAccumulator(str(folder / "tiny" / "version_0"))
        events.Reload()
        assert events.Scalars("watch/device/memory_gib")
        tags = [tag for tag in events.Tags()["images"] if tag.startswith("view/")]
        pictures.append(
            {tag: events.Images(tag)[0].encoded_image_string for tag in tags}
        )
    assert len(pictures[0]) >= 6
    assert pictures[0] == pictures[1]  # pixel for pixel, as nothing was learned


def assert_equal_runs(folder: Path, expected: Path) -> None:
    assert equal(weights(folder / RUN), weights(expected / RUN))
    for tag in TAGS:
        assert curve(folder, tag) == pytest.approx(curve(expected, tag), rel=1e-6), tag


@pytest.fixture(scope="session")
def uninterrupted(on_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(on_ranks, 2, folder, *DROPOUT)
    return folder


class Terminate(Callback):
    """Sends a signal to one rank, or to all of them at different batches, in the second
    epoch."""

    def __init__(self, ranks: list[int], number: int = signal.SIGTERM) -> None:
        self.ranks = ranks
        self.number = number
        StopOnSignal.every_n_steps = 4

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, i: int
    ) -> None:
        rank = trainer.global_rank
        if rank in self.ranks and (trainer.current_epoch, i) == (1, 1 + rank):
            signal.raise_signal(self.number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminated", "number", "name"),
    [([1], signal.SIGTERM, "SIGTERM"), ([0, 1], signal.SIGINT, "Ctrl-C")],
)
def test_all_ranks_stop_together_at_a_signal(
    on_ranks, tmp_path, uninterrupted, terminated, number, name
):
    callback = ("--trainer.callbacks", "test_distributed.Terminate")
    options = ("--trainer.callbacks.ranks", terminated)
    options += ("--trainer.callbacks.number", int(number))
    outputs = run(
        on_ranks, 2, tmp_path, *DROPOUT, *callback, *options, status=128 + number
    )
    assert f"Stopped by {name}; to continue:\ntorchrun (or srun) ... " in outputs[0]
    assert not outputs[1]
    assert checkpoint(tmp_path / RUN)["global_step"] == 9 + 4
    run(on_ranks, 2, tmp_path, *DROPOUT, "--ckpt_path", "last")
    assert_equal_runs(tmp_path, uninterrupted)


# what goes wrong


class TracksOnOne(Classifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            return super().training_step(batch, batch_idx)
        return self.criterion(self.net(batch[0]), batch[1])


TOO_LARGE = "data.batch_size 110 times 3 processes: only 315 training samples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ckpt_path", "last"), "no run in"),
        (("--data.batch_size", 110), TOO_LARGE),
        (("--trainer.devices", 2), "torchrun or SLURM has started 3"),
        (
            ("--model", "test_distributed.TracksOnOne"),
            "1 of 3 processes called track() in train",
        ),
        (
            ("--monitor", "val/no", "--monitor_mode", "max"),
            "--monitor 'val/no' is not among",
        ),
    ],
)
def test_a_mistake_is_told_once(on_ranks, tmp_path, args, message):
    result = on_ranks(3, "test_distributed.train", tmp_path, *args)
    assert all(result.statuses)
    text = "".join(result.outputs)
    assert message in next(line for line in text.splitlines() if "error: " in line)
    assert "Traceback" not in text
    assert not list(tmp_path.rglob("*.ckpt"))


class BreaksOnOne(Classifier):
    """Its loss becomes infinite on the second rank, in the second epoch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_here = (self.current_epoch, batch_idx, self.global_rank) == (1, 3, 1)
        return loss * torch.inf if is_here else loss


@pytest.mark.slow
def test_all_ranks_stop_at_the_loss_that_is_no_number_on_one(on_ranks, tmp_path):
    outputs = run(
        on_ranks, 2, tmp_path, "--model", "test_distributed.BreaksOnOne", status=1
    )
    assert "NaN or infinite after step 15, in epoch 2" in outputs[0]
    assert "Traceback" not in "".join(outputs)
    saved = checkpoint(tmp_path / RUN)
    assert saved["epoch"] == 0
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


class Fail(Callback):
    """Fails on one rank, in the second epoch."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, i: int
    ) -> None:
        if (trainer.current_epoch, i, trainer.global_rank) == (1, 3, 1):
            raise ValueError("a bug on rank 1")


def test_a_bug_on_one_rank_ends_the_others_and_keeps_its_traceback(on_ranks, tmp_path):
    fail = ("--trainer.callbacks", "test_distributed.Fail")
    result = on_ranks(2, "test_distributed.train", tmp_path, *fail)
    assert all(result.statuses)
    assert "ValueError: a bug on rank 1" in result.outputs[1]
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {
        "best.ckpt",
        "last.ckpt",
    }


# the command itself, which starts the other processes


StartCommand = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_command(tmp_path: Path) -> Iterator[StartCommand]:
    started = []

    def begin(*args: object, strategy: str = "ddp") -> subprocess.Popen[str]:
        command = f"{sys.executable} {HERE}/scripts/train.py --config {TINY}"
        command += f" --trainer.strategy {strategy} --trainer.devices 2"
        command += f" --trainer.default_root_dir {tmp_path}"
        process = programs.start(
            [*command.split(), *map(str, args)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # so that no process that it leaves behind can be missed
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


LIMIT_S = 200  # under load a start takes a minute


def assert_none_left(session: int) -> None:
    """The processes of the session end soon."""
    end = time.monotonic() + LIMIT_S / 4
    while left := [
        path for path in Path("/proc").glob("[0-9]*") if session_of(path) == session
    ]:
        assert time.monotonic() < end, [(path / "cmdline").read_text() for path in left]
        time.sleep(0.1)


def session_of(process: Path) -> int | None:
    """The session id of a process that is alive; see proc_pid_stat(5)."""
    try:
        state, _, _, session, *_ = (
            (process / "stat").read_text().rpartition(")")[2].split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has ended meanwhile
    return int(session) if state != "Z" else None


def children(process: subprocess.Popen[str]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text().split()]


def wait_for(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout
    assert any(line.startswith(beginning) for line in process.stdout)


@pytest.fixture(scope="session")
def on_two_ranks(on_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on_two_ranks")
    run(on_ranks, 2, folder)
    return folder


LONG = ("--data.num_train", 5000, "--trainer.max_epochs", 100)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_notebook", "ddp_spawn"])
@pytest.mark.linux
def test_strategies_by_flag(start_command, tmp_path, on_two_ranks, strategy):
    process = start_command(strategy=strategy)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert_none_left(process.pid)
    assert "Device: CPU, processes: 2, threads of each: 1" in output
    assert output.count("Run folder: ") == 1
    assert strategy == "ddp_spawn" or "warn" not in output.lower()
    metrics, expected = metrics_of(tmp_path), metrics_of(on_two_ranks)
    assert metrics == pytest.approx(
        {**expected, "train_seconds": metrics["train_seconds"]}
    )
    assert metrics["test/num_samples"] == 75


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["first", "second"])
@pytest.mark.linux
def test_a_killed_rank_ends_the_command(start_command, killed):
    process = start_command(*LONG)
    wait_for(process, "Epoch 1 ")
    time.sleep(0.1)
    (second,) = children(process)
    os.kill(second if killed == "second" else process.pid, signal.SIGKILL)
    assert process.wait(LIMIT_S / 4) != 0
    assert_none_left(process.pid)


@pytest.mark.slow
@pytest.mark.linux
def test_ctrl_c_in_a_terminal_reaches_all_processes_and_stops_the_command(
    start_command, tmp_path
):
    process = start_command(*LONG, "--data.num_workers", 1)
    wait_for(process, "Epoch 1 ")
    begin = time.monotonic()
    wait_for(process, "Epoch 2 ")
    time.sleep((time.monotonic() - begin) / 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert output.splitlines()[-2] == "Stopped by Ctrl-C; to continue:"
    assert "Traceback" not in output
    assert_none_left(process.pid)
    # in the middle of an epoch
    assert checkpoint(tmp_path / RUN)["global_step"] % (4_500 // 32)


class AskOnOneRank(Callback):
    """Exchanges something on rank 0 alone, in the second epoch."""

    def __init__(self) -> None:
        signals.STUCK_S = 4

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            print("asking", flush=True)
            _ = trainer.log_dir


@pytest.mark.slow
@pytest.mark.linux
def test_sigterm_ends_a_run_whose_ranks_wait_for_each_other(start_command):
    process = start_command("--trainer.callbacks", "test_distributed.AskOnOneRank")
    wait_for(process, "asking")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143
    reason = "after 4 s: a rank is missing in a collective; go on with --ckpt_path last"
    assert f"Stopped by SIGTERM {reason}\n" in output
    assert_none_left(process.pid)


@pytest.mark.slow
def test_two_machines_by_torchrun(tmp_path: Path) -> None:
    """The command of docs/devices.md, with both "machines" on the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 "
        f"--rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=127.0.0.1:{port} -- "
        f"scripts/train.py --config {TINY} --trainer.default_root_dir {tmp_path}"
    )
    piped: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    machines = [subprocess.Popen(program.split(), cwd=HERE, **piped) for _ in range(2)]
    outputs = [machine.communicate(timeout=LIMIT_S)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(outputs)
    assert "".join(outputs).count("Run folder: ") == 1
    assert metrics_of(tmp_path)["test/num_samples"] == 75
