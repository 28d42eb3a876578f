"""Runs of several processes. Functions without `test_` run on the ranks of `tests/ranks.py`."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
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
from ranks import RunRanks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_curves import epoch_lines
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from lightbase.cli.training_cli import TrainingCLI
from lightbase.curves import run_folder
from lightbase.data.batches import EpochBatchSampler, ResumableLoader, as_it_is
from lightbase.data.module import BaseDataModule, Batch
from lightbase.devices import signals
from lightbase.devices.processes import StopOnSignal
from lightbase.run.train import main


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRanks]:
    if sys.platform != "linux":
        pytest.skip("forks processes that use torch")
    with ranks.start(tmp_path_factory.mktemp("ranks")) as run:
        yield run


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


class Drawn(Dataset[Any]):
    """The numbers from `start` on, each beside what a random transform would draw."""

    def __init__(self, start: int, num: int) -> None:
        self.start = start
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([self.start + i, torch.rand(()).item()]), i % 2


class DrawnNumbers(Numbers):
    def load(self, split: Literal["train", "test"]) -> Any:
        return Drawn(0 if split == "train" else 1000, self.num[split])


class PlainNumbers(LightningDataModule):
    """The same by torch's own loaders, which know nothing of ranks."""

    def loader(self, start: int, num: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(Drawn(start, num), batch_size=4, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(0, 48, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(48, 5)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(1000, 25)

    predict_dataloader = test_dataloader


class StockNumbers(Numbers):
    """Trains from a loader of torch's own; the others are ours."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Drawn(0, 48), batch_size=4, shuffle=True)


class OurLoaders(PlainNumbers):
    """Our loader in a plain data module."""

    def train_dataloader(self) -> DataLoader[Any]:
        order = {"rank": self.trainer.global_rank, "num_ranks": self.trainer.world_size}  # type: ignore[union-attr]
        return ResumableLoader(Drawn(0, 48), EpochBatchSampler(48, 4, shuffle=True, **order))


class StockImages(SyntheticImages):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["train"], batch_size=16, shuffle=True, collate_fn=as_it_is)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["val"], batch_size=16, collate_fn=as_it_is)


class WithBuffer(nn.Module):
    """A network with a buffer: DDP exchanges it in every forward, also where the ranks have
    unequally many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.linear(x)


class Seen(LightningModule):
    """Notes the numbers of every batch, in fit, validation, test and predict, a list an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = WithBuffer()
        stages = ("train", "val", "test", "predict")
        self.seen: dict[str, list[list[list[int]]]] = {stage: [] for stage in stages}
        self.draws: list[float] = []

    def note(self, stage: str, batch: Batch) -> Tensor:
        self.seen[stage][-1].append(batch[0][:, 0].int().tolist())
        if stage == "train":
            self.draws += batch[0][:, 1:].flatten().tolist()
        return nn.functional.cross_entropy(self.net(batch[0][:, :1]), batch[1])

    def on_train_epoch_start(self) -> None:
        self.seen["train"].append([])
        torch.rand(3 * self.global_rank)  # the ranks' generators drift apart

    def on_validation_epoch_start(self) -> None:
        self.seen["val"].append([])

    def on_test_epoch_start(self) -> None:
        self.seen["test"].append([])

    def on_predict_epoch_start(self) -> None:
        self.seen["predict"].append([])

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


QUIET: dict[str, Any] = {
    **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
    **{"enable_model_summary": False, "num_sanity_val_steps": 0},
}


def look(folder: str, seed: int | None, data_options: dict[str, Any]) -> None:
    """Fit, test and predict Numbers by a Trainer made by hand; leaves seen_RANK.json."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(seed if seed is not None else random.SystemRandom().randrange(2**31))
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": num_ranks, "strategy": "ddp"},
        **{"max_epochs": 2, "barebones": False, **QUIET},
    )
    use(trainer, Seen(), Numbers(**{"batch_size": 4, **data_options}), folder)


def look_by_flags(folder: str, data: str, *flags: Any) -> None:
    """The same, as flags have it."""
    args = ["--model", "test_distributed.Seen", "--data", f"test_distributed.{data}"]
    args += map(str, flags)
    cli = TrainingCLI([*args, "--trainer.accelerator", "cpu", "--trainer.max_epochs", "2"])
    use(cli.make_trainer(**QUIET), cli.model, cli.datamodule, folder)


def use(trainer: Trainer, model: Any, data: LightningDataModule, folder: str) -> None:
    trainer.fit(model, data)
    loader: Any = trainer.train_dataloader
    trainer.test(model, data, verbose=False)
    trainer.predict(model, data, return_predictions=False)
    found = {**model.seen, "draws": model.draws, "sampler": type(loader.sampler).__name__}
    Path(folder, f"seen_{trainer.global_rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def seen(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"seen_{rank}.json").read_text()) for rank in range(num_ranks)]


def together(found: list[dict[str, Any]], stage: str, epoch: int) -> list[int]:
    """The numbers that all ranks saw in an epoch."""
    return list(chain(*chain(*(rank[stage][epoch] for rank in found))))


OPTIONS = {
    "full batches": {},
    "all samples": {"drop_last": False},
    # one rank has a batch more in the validation, two of three have one less
    "9 for validation": {"val_fraction": 0.17},
    "13 for validation": {"val_fraction": 0.25, "drop_last": False},
    "workers": {"num_workers": 1},
}


@pytest.mark.parametrize(
    "num_ranks", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            options, marks=[] if name in ("full batches", "workers") else pytest.mark.slow, id=name
        )
        for name, options in OPTIONS.items()
    ],
)
def test_which_samples_each_rank_sees(on_ranks, tmp_path, num_ranks, options):
    seed = None if "num_workers" in options else 3
    result = on_ranks(num_ranks, "test_distributed.look", tmp_path, seed, options)
    assert result.statuses == [0] * num_ranks, result.outputs
    found = seen(tmp_path, num_ranks)

    num_val = round(53 * options.get("val_fraction", 0.1))
    num_train = 53 - num_val
    orders = []
    for epoch in range(2):
        batches = [rank["train"][epoch] for rank in found]
        assert len({len(own) for own in batches}) == 1  # equally many steps
        numbers = together(found, "train", epoch)
        assert max(Counter(numbers).values()) == 1
        if options.get("drop_last", True):
            assert {len(batch) for batch in chain(*batches)} == {4}
            assert len(numbers) == num_train // (4 * num_ranks) * 4 * num_ranks
        else:
            assert len(numbers) == num_train // num_ranks * num_ranks
        val = together(found, "val", epoch)
        assert len(val) == num_val
        assert not set(val) & set(numbers)
        assert sorted(val) == sorted(together(found, "val", 0))
        orders.append(batches)
    assert orders[0] != orders[1]
    for stage in ("test", "predict"):
        assert sorted(together(found, stage, 0)) == list(range(1000, 1025)), stage


def by_flags(on_ranks: RunRanks, folder: Path, num_ranks: int, *args: Any) -> list[dict[str, Any]]:
    result = on_ranks(num_ranks, "test_distributed.look_by_flags", folder, *args)
    assert result.statuses == [0] * num_ranks, "\n".join(result.outputs)
    return seen(folder, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_dataset_is_shared_out_and_its_random_transforms_differ_by_rank(
    on_ranks, tmp_path, num_workers
):
    flags = ("--data.batch_size", 4, "--data.num_workers", num_workers, "--data.drop_last", "false")
    found = by_flags(on_ranks, tmp_path, 2, "DrawnNumbers", *flags)
    for epoch in range(2):
        first, second = (rank["train"][epoch] for rank in found)
        assert (
            [len(batch) for batch in first]
            == [len(batch) for batch in second]
            == [4, 4, 4, 4, 4, 4]
        )
        train, val = together(found, "train", epoch), together(found, "val", epoch)
        assert sorted(train + val) == list(range(53))  # each once
    for stage in ("test", "predict"):
        assert sorted(together(found, stage, 0)) == list(range(1000, 1025)), stage
    assert [rank["sampler"] for rank in found] == ["EpochBatchSampler"] * 2  # ours shards itself
    draws = list(chain(*(rank["draws"] for rank in found)))
    assert len(draws) == len(set(draws)) == 2 * 48


def test_a_plain_data_module_gets_lightnings_sampler(on_ranks: RunRanks, tmp_path: Path) -> None:
    found = by_flags(on_ranks, tmp_path, 2, "PlainNumbers")
    assert [rank["sampler"] for rank in found] == ["DistributedSampler"] * 2
    orders = [together(found, "train", epoch) for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(48))
    assert orders[0] != orders[1]
    assert set(together(found, "val", 0)) == set(range(48, 53))
    assert set(together(found, "test", 0)) == set(range(1000, 1025))
    assert (
        len(together(found, "test", 0)) == 26
    )  # Lightning's sampler gives one twice, to make the shares equal


@pytest.mark.parametrize(
    ("data", "sampler"),
    [
        pytest.param("StockNumbers", "DistributedSampler", marks=pytest.mark.slow),
        ("OurLoaders", "EpochBatchSampler"),
    ],
)
def test_each_loader_is_shared_out_once(on_ranks, tmp_path, data, sampler):
    found = by_flags(on_ranks, tmp_path, 2, data)
    assert [rank["sampler"] for rank in found] == [sampler] * 2
    orders = [together(found, "train", epoch) for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(48))
    assert orders[0] != orders[1]
    if data == "StockNumbers":
        assert sorted(together(found, "test", 0)) == list(range(1000, 1025))  # without padding


@pytest.mark.slow
def test_the_schedule_of_a_stock_loader_is_that_of_its_share(on_ranks, tmp_path):
    flags = ("--model.scheduler", "CosineAnnealingLR", "--model.scheduler_interval", "step")
    outputs = run(on_ranks, 2, tmp_path, "--data", "test_distributed.StockImages", *flags)
    limits = "a resume may end with other weights; several processes may count samples twice"
    assert f"StockImages has its own DataLoaders: {limits}\n" in outputs[0]
    assert "StockImages" not in outputs[1]
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert saved["lr_schedulers"][0]["T_max"] == saved["global_step"] == 20


@pytest.mark.parametrize("data", [pytest.param("Numbers", marks=pytest.mark.slow), "PlainNumbers"])
@pytest.mark.parametrize(
    ("flag", "changes"),
    [("limit_train_batches", True), pytest.param("overfit_batches", False, marks=pytest.mark.slow)],
)
def test_a_part_of_the_batches(on_ranks, tmp_path, data, flag, changes):
    options = ("--data.batch_size", 4) if data == "Numbers" else ()
    found = by_flags(on_ranks, tmp_path, 2, data, f"--trainer.{flag}", 3, *options)
    for rank in found:
        assert [len(epoch) for epoch in rank["train"]] == [3, 3]
    epochs = [together(found, "train", epoch) for epoch in range(2)]
    assert len(set(epochs[0])) == len(set(epochs[1])) == 2 * 3 * 4  # no sample on both ranks
    assert (epochs[0] != epochs[1]) == changes


# metrics


class Logits(BaseDataModule):
    """Logits of 3 classes, (N, 3), that are right more often than not."""

    classes = ["a", "b", "c"]

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(len(split))
        targets = torch.multinomial(
            torch.tensor([0.6, 0.3, 0.1]), 53 if split == "train" else 25, True, generator=generator
        )
        return torch.randn(len(targets), 3, generator=generator) + nn.functional.one_hot(
            targets, 3
        ), targets


class Scale(nn.Module):
    """Multiplies by a weight, which is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def metrics() -> dict[str, Any]:
    return {"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3, thresholds=None)}


def measure(folder: str) -> None:
    """Fit without learning, and test; leaves metrics_RANK.json and, on the first rank, the
    samples."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    model = Classifier(Scale(), metrics=metrics(), num_classes=3, lr=1e-12)
    data = Logits(batch_size=4, val_fraction=0.25)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": num_ranks, "strategy": "ddp"},
        **{"max_epochs": 1, "log_every_n_steps": 100, **QUIET},
    )
    trainer.fit(model, data)
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    found |= trainer.test(model, data, verbose=False)[0]
    Path(folder, f"metrics_{trainer.global_rank}.json").write_text(json.dumps(found))
    if trainer.global_rank == 0:
        torch.save(
            {
                name: data.splits[name].__getitems__(list(range(len(data.splits[name]))))
                for name in ("val", "test")
            },
            Path(folder, "samples.pt"),
        )
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "num_ranks", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
def test_metrics_are_those_of_all_samples_at_once(on_ranks, tmp_path, num_ranks):
    result = on_ranks(num_ranks, "test_distributed.measure", tmp_path)
    assert result.statuses == [0] * num_ranks, "\n".join(result.outputs)
    expected = {"test/num_samples": 25.0}
    for stage, (logits, targets) in torch.load(tmp_path / "samples.pt").items():
        assert len(targets) == {"val": 13, "test": 25}[stage]  # unequal shares of 2 and 3 ranks
        expected[f"{stage}/loss"] = nn.functional.cross_entropy(logits, targets).item()
        expected |= {
            f"{stage}/{name}": metric(logits, targets).item() for name, metric in metrics().items()
        }
    for rank in range(num_ranks):
        found = json.loads((tmp_path / f"metrics_{rank}.json").read_text())
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert {"train/loss", "train/f1", "train/auroc"} <= found.keys()


# whole runs


def curve(folder: Path, tag: str) -> dict[int, float]:
    """Step to value, of the only run below `folder`."""
    (event_folder,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(event_folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def weights(folder: Path, name: str = "last.ckpt") -> dict[str, Tensor]:
    (path,) = folder.rglob(name)
    return torch.load(path, weights_only=True)["state_dict"]


def run(on_ranks: RunRanks, num_ranks: int, folder: Path, *args: Any, status: int = 0) -> list[str]:
    """Train; the ranks' outputs."""
    result = on_ranks(num_ranks, "test_distributed.train", folder, *args)
    assert result.statuses == [status] * num_ranks, "\n".join(result.outputs)
    return result.outputs


@pytest.mark.slow
def test_two_ranks_follow_one_process_with_twice_the_batch(on_ranks, tmp_path):
    args = ("--trainer.max_epochs", 3, "--trainer.accumulate_grad_batches", 2)
    shown_by_one = run(on_ranks, 1, tmp_path / "1", "--data.batch_size", 32, *args)
    shown_by_two = run(on_ranks, 2, tmp_path / "2", "--data.batch_size", 16, *args)
    run(on_ranks, 3, tmp_path / "3", "--data.batch_size", 16, *args)
    one, two, three = (weights(tmp_path / number) for number in "123")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)
    assert any(
        not torch.allclose(three[name], value, rtol=1e-4, atol=1e-5) for name, value in one.items()
    )
    for tag in ("train/loss", "train/acc", "val/loss", "val/acc", "lr", "test/loss", "test/acc"):
        assert curve(tmp_path / "2", tag) == pytest.approx(curve(tmp_path / "1", tag), rel=1e-4), (
            tag
        )
    assert len(curve(tmp_path / "1", "train/loss")) > 1
    lines = [epoch_lines(shown[0]) for shown in (shown_by_one, shown_by_two)]
    assert len(lines[0]) == 3
    assert all(lines[1][epoch] == pytest.approx(line, abs=2e-4) for epoch, line in lines[0].items())


def test_one_folder_and_one_voice(on_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run(on_ranks, 2, tmp_path)
    assert first.count("Run folder: ") == 1
    assert second == ""
    assert [line.split(":")[0].split(" ")[0] for line in first.splitlines()] == [
        *("Data", "Network", "Best", "Device", "Curves", "Epoch", "Epoch", "Trained", "Test", "Run")
    ]
    (folder,) = (tmp_path / "tiny").iterdir()
    names = {path.name for path in folder.iterdir()} - {
        path.name for path in folder.glob("events.out.tfevents.*")
    }
    # code.diff only where the code is not committed
    files = "checkpoints config.yaml environment.txt hparams.yaml metrics.json progress.json"
    assert names - {"code.diff"} == {*files.split()}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert json.loads((folder / "metrics.json").read_text())["test/num_samples"] == 75
    config = yaml.safe_load((folder / "config.yaml").read_text())
    # as the launcher has it
    assert (config["trainer"]["devices"], config["trainer"]["strategy"]) == (2, "ddp")


@pytest.mark.slow
def test_test_results_do_not_depend_on_the_number_of_ranks(on_ranks, tmp_path):
    run(on_ranks, 1, tmp_path)
    (checkpoint,) = tmp_path.rglob("best.ckpt")
    (metrics,) = tmp_path.rglob("metrics.json")
    trained = json.loads(metrics.read_text())
    for num_ranks in (1, 2, 3):
        flags = ["--data.batch_size", 7, "--report", tmp_path / str(num_ranks)]
        result = on_ranks(num_ranks, "test_distributed.evaluate", "--ckpt_path", checkpoint, *flags)
        assert not any(result.statuses), result.outputs
        for name in ("report.csv", "confusion_matrix.csv"):
            assert (tmp_path / str(num_ranks) / name).read_text() == (
                tmp_path / "1" / name
            ).read_text()
        found = json.loads(result.outputs[0].splitlines()[-1])
        assert found == pytest.approx({name: trained[name] for name in found}, rel=1e-5)
        assert found["test/num_samples"] == 75
        assert not any(result.outputs[1:])


class Dropout(nn.Module):
    """For images (N, 3, 8, 8) of 4 classes: every rank draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.3), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


DROPOUT = (
    *("--model.net", "test_distributed.Dropout", "--trainer.max_epochs", 3,
        "--trainer.log_every_n_steps", 3),
    *("--model.metrics", json.dumps({
        "f1": {"class_path": "torchmetrics.classification.MulticlassF1Score"},
        "auroc": {"class_path": "torchmetrics.classification.MulticlassAUROC"},
    })),
)  # fmt: skip


@pytest.mark.slow
def test_the_first_rank_watches_and_the_pictures_hold_the_samples_of_all(on_ranks, tmp_path):
    watched = "--step_timer true --device_monitor true --figures_every_n_epochs 1 --model.lr 1e-12"
    flags = (*watched.split(), "--trainer.max_epochs", 1, "--trainer.log_every_n_steps", 1)
    found = {}
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        batches = ("--data.batch_size", 32 // num_ranks)
        shown = run(on_ranks, num_ranks, folder, *flags, *batches)
        assert sum("Where the time of training went" in text for text in shown) == 1
        events = EventAccumulator(str(folder / "tiny" / "version_0"))
        events.Reload()
        assert len(events.Scalars("watch/step_time/forward_percent")) == 1
        assert events.Scalars("watch/device/memory_gib")
        names = ("confusion_matrix", "predictions", "mistakes")
        found[num_ranks] = [
            events.Images(f"view/{name}/{on}")[0].encoded_image_string
            for name in names
            for on in ("val", "test")
        ]
    assert found[1] == found[2]  # pixel for pixel, as nothing was learned


def assert_equal_runs(found: Path, expected: Path) -> None:
    for name, value in weights(expected).items():
        assert torch.equal(weights(found)[name], value), name
    for tag in ("train/loss", "train/f1", "train/auroc", "val/loss", "val/f1", "val/auroc"):
        assert curve(found, tag) == pytest.approx(curve(expected, tag), rel=1e-6), tag


@pytest.fixture(scope="session")
def uninterrupted(on_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(on_ranks, 2, folder, *DROPOUT)
    return folder


@pytest.mark.slow
def test_a_resumed_run_of_two_ranks_ends_as_an_uninterrupted_one(on_ranks, tmp_path, uninterrupted):
    run(on_ranks, 2, tmp_path, *DROPOUT, "--trainer.max_epochs", 1)
    run(on_ranks, 2, tmp_path, *DROPOUT, "--ckpt_path", "last")
    assert_equal_runs(tmp_path, uninterrupted)


# the validation after the last batch of an epoch writes best.ckpt, before the epoch has ended
TO_THE_END = (
    *("--data.num_train", 356, "--trainer.val_check_interval", 0.5),
    *("--trainer.log_every_n_steps", 100, "--monitor", "val/loss", "--model.lr", 0.001),
)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow
def test_a_run_goes_on_from_a_validation_that_ended_its_epoch(on_ranks, tmp_path, num_ranks):
    args = (*TO_THE_END, "--data.batch_size", 32 // num_ranks)
    outputs = run(on_ranks, num_ranks, tmp_path / "cut", *args)
    assert "sync_dist" not in "".join(outputs)  # Lightning's hint, where values are equal already
    (path,) = tmp_path.rglob("best.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == 20
    longer = ("--trainer.max_epochs", 3)
    run(on_ranks, num_ranks, tmp_path / "more", *args, "--ckpt_path", path, *longer)
    run(on_ranks, num_ranks, tmp_path / "whole", *args, *longer)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "more")[name], value), name
    for tag in ("train/loss", "val/loss"):
        whole = curve(tmp_path / "whole", tag)
        rest = curve(tmp_path / "more", tag)
        assert max(rest) == max(whole) == 29
        assert rest == pytest.approx({step: whole[step] for step in rest}, rel=1e-6), tag


class Terminate(Callback):
    """Sends a signal to one rank, or to all of them at different batches, in the second epoch."""

    def __init__(self, ranks: list[int], number: int = signal.SIGTERM) -> None:
        self.ranks = ranks
        self.number = number
        StopOnSignal.every_n_steps = 4

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rank = trainer.global_rank
        if rank in self.ranks and (trainer.current_epoch, batch_idx) == (1, 1 + rank):
            signal.raise_signal(self.number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminated", "number", "name"),
    [
        pytest.param([0], signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow),
        ([1], signal.SIGTERM, "SIGTERM"),
        pytest.param([0, 1], signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow),
        pytest.param([0, 1], signal.SIGINT, "Ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_together_at_a_signal(
    on_ranks, tmp_path, uninterrupted, terminated, number, name
):
    callback = ("--trainer.callbacks", "test_distributed.Terminate")
    options = ("--trainer.callbacks.ranks", terminated, "--trainer.callbacks.number", int(number))
    outputs = run(on_ranks, 2, tmp_path, *DROPOUT, *callback, *options, status=128 + number)
    assert outputs[0].endswith(f"Stopped by {name}; go on with --ckpt_path last\n")
    assert not outputs[1]
    (path,) = tmp_path.rglob("last.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == 9 + 4
    run(on_ranks, 2, tmp_path, *DROPOUT, "--ckpt_path", "last")
    assert_equal_runs(tmp_path, uninterrupted)


# what goes wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ckpt_path", "last"), "no run in"),
        (("--data.num_test", 2), "3 processes for the 2 samples of test"),
        (
            ("--data.batch_size", 110),
            "data.batch_size 110 times 3 processes: only 315 training samples",
        ),
        (("--trainer.devices", 2), "num_nodes 1: torchrun or SLURM has started 3"),
        (("--trainer.strategy", "dp"), "trainer.strategy dp"),
        (("--monitor", "val/no", "--monitor_mode", "max"), "--monitor 'val/no' is not among"),
    ],
)
def test_a_mistake_is_told_once(on_ranks, tmp_path, args, message):
    result = on_ranks(3, "test_distributed.train", tmp_path, *args)
    assert all(result.statuses)
    errors = [
        line for output in result.outputs for line in output.splitlines() if "error: " in line
    ]
    assert message in errors[0]
    assert "Traceback" not in "".join(result.outputs)
    assert not list(tmp_path.rglob("*.ckpt")) or "--data.num_test" in args


class BreaksOnOne(Classifier):
    """Its loss becomes infinite on the second rank, in the second epoch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_here = (self.current_epoch, batch_idx, self.global_rank) == (1, 3, 1)
        return loss * torch.inf if is_here else loss


@pytest.mark.slow
def test_all_ranks_stop_at_the_loss_that_is_no_number_on_one(on_ranks, tmp_path):
    result = on_ranks(
        2, "test_distributed.train", tmp_path, "--model", "test_distributed.BreaksOnOne"
    )
    assert result.statuses == [1, 1]
    assert [
        line
        for line in result.outputs[0].splitlines()
        if "NaN or infinite after step 15, in epoch 2" in line
    ]
    assert "Traceback" not in "".join(result.outputs)
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert saved["epoch"] == 0
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


class Fail(Callback):
    """Fails on one rank, in the second epoch or at the very end."""

    def __init__(self, at_the_end: bool = False) -> None:
        self.at_the_end = at_the_end

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        is_here = (trainer.current_epoch, batch_idx, trainer.global_rank) == (1, 3, 1)
        if is_here and not self.at_the_end:
            raise ValueError("a bug on rank 1")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_the_end and trainer.global_rank == 1:
            raise ValueError("a bug on rank 1")


def test_a_bug_on_one_rank_ends_the_others_and_keeps_its_traceback(on_ranks, tmp_path):
    result = on_ranks(
        2, "test_distributed.train", tmp_path, "--trainer.callbacks", "test_distributed.Fail"
    )
    assert all(result.statuses)
    assert "ValueError: a bug on rank 1" in result.outputs[1]
    assert "the processes of this run have lost each other" in result.outputs[0]
    assert "Traceback" not in result.outputs[0]
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {"best.ckpt", "last.ckpt"}


# the command itself, which starts the other processes


def command(folder: Path, *args: object, strategy: str = "ddp") -> list[str]:
    return [
        *(sys.executable, str(HERE / "scripts" / "train.py"), "--config", TINY),
        *("--trainer.strategy", strategy),
        *("--trainer.devices", "2", "--trainer.default_root_dir", str(folder), *map(str, args)),
    ]


@pytest.fixture
def start_command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def begin(*args: object, strategy: str = "ddp") -> subprocess.Popen[str]:
        process = programs.start(
            command(tmp_path, *args, strategy=strategy),
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that no process that it leaves behind can be missed
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def assert_none_left(session: int, seconds: float) -> None:
    """No process of the session is alive after so long."""
    end = time.monotonic() + seconds
    while left := [path for path in Path("/proc").glob("[0-9]*") if session_of(path) == session]:
        assert time.monotonic() < end, [(path / "cmdline").read_text() for path in left]
        time.sleep(0.1)


def session_of(process: Path) -> int | None:
    """The session id of a process that is alive; see proc_pid_stat(5)."""
    try:
        state, _, _, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has ended meanwhile
    return int(session) if state != "Z" else None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_notebook", "ddp_spawn"])
@pytest.mark.linux
def test_strategies_by_flag(start_command, tmp_path, on_ranks, strategy):
    process = start_command(strategy=strategy)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert_none_left(process.pid, 2)
    assert "Device: CPU (2 processes, 1 thread each)" in output
    assert output.count("Run folder: ") == 1
    assert strategy == "ddp_spawn" or "warn" not in output.lower()
    run(on_ranks, 2, tmp_path / "expected")
    paths = (tmp_path / name / "version_0" / "metrics.json" for name in ("tiny", "expected/tiny"))
    found, expected = (json.loads(path.read_text()) for path in paths)
    assert found == pytest.approx({**expected, "train_seconds": found["train_seconds"]}, rel=1e-5)
    assert found["test/num_samples"] == 75


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["first", "second"])
@pytest.mark.linux
def test_a_killed_rank_ends_the_command(start_command, killed):
    process = start_command("--data.num_train", 5_000, "--trainer.max_epochs", 100)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("Epoch 1 "):
            break
    (second,) = map(
        int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    time.sleep(0.1)
    os.kill(second if killed == "second" else process.pid, signal.SIGKILL)
    assert process.wait(30) != 0
    assert_none_left(process.pid, 10)


@pytest.mark.slow
@pytest.mark.linux
def test_ctrl_c_in_a_terminal_reaches_all_processes_and_stops_the_command(start_command, tmp_path):
    process = start_command(
        "--data.num_train", 5_000, "--trainer.max_epochs", 100, "--data.num_workers", 1
    )
    assert process.stdout
    assert any(line.startswith("Epoch 1 ") for line in process.stdout)
    begin = time.monotonic()
    assert any(line.startswith("Epoch 2 ") for line in process.stdout)
    time.sleep((time.monotonic() - begin) / 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.splitlines()[-1] == "Stopped by Ctrl-C; go on with --ckpt_path last"
    assert "Traceback" not in output
    assert_none_left(process.pid, 5)
    (path,) = tmp_path.rglob("last.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] % (4_500 // 32), (
        "at the end of an epoch"
    )


class AskOnOneRank(Callback):
    """Exchanges something on rank 0 alone, in the second epoch."""

    def __init__(self) -> None:
        signals.STUCK_S = 4

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            print("asking", flush=True)
            _ = trainer.log_dir


@pytest.mark.slow
@pytest.mark.linux
def test_sigterm_ends_a_run_whose_ranks_wait_for_each_other(start_command):
    process = start_command("--trainer.callbacks", "test_distributed.AskOnOneRank")
    assert process.stdout
    assert any(line == "asking\n" for line in process.stdout)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    (message,) = [line for line in output.splitlines() if line.startswith("Stopped by SIGTERM")]
    assert message.endswith(
        "after 4 s: a rank is missing in a collective; go on with --ckpt_path last"
    )
    assert_none_left(process.pid, 5)


class NoteFolder(Callback):
    """Writes into the run's folder on the last rank alone."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            (run_folder(trainer) / "note.txt").write_text("here")
            print(f"noted in {run_folder(trainer)}")


@pytest.mark.slow
def test_one_rank_alone_can_ask_for_the_folder_of_the_run(on_ranks, tmp_path):
    args = ("--trainer.callbacks", "test_distributed.NoteFolder", "--trainer.max_epochs", 1)
    run(on_ranks, 2, tmp_path, *args)
    assert (tmp_path / "tiny" / "version_0" / "note.txt").read_text() == "here"
    for num_ranks in (1, 2):
        outputs = run(
            on_ranks, num_ranks, tmp_path / "dev", *args, "--trainer.fast_dev_run", "true"
        )
        (line,) = [line for line in outputs[-1].splitlines() if line.startswith("noted in ")]
        assert "fast_dev_run" in line
        assert not Path(line.removeprefix("noted in ")).exists()
    assert not list((tmp_path / "dev").rglob("note.txt"))


@pytest.mark.slow
@pytest.mark.linux
def test_a_rank_that_fails_after_the_others_are_done_fails_the_command(start_command):
    fail = "--trainer.callbacks test_distributed.Fail --trainer.callbacks.at_the_end true"
    process = start_command(*fail.split())
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "a bug on rank 1" in output
    assert_none_left(process.pid, 5)


@pytest.mark.slow
def test_two_machines_by_torchrun(tmp_path: Path) -> None:
    """The command of docs/devices.md, with both "machines" on the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "torch.distributed.run"]
    program += ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=1"]
    program += [f"--rdzv-endpoint=127.0.0.1:{port}", "--", "scripts/train.py", "--config", TINY]
    program += ["--trainer.default_root_dir", str(tmp_path)]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    machines = [subprocess.Popen(program, cwd=HERE, **piped) for _ in range(2)]
    outputs = [machine.communicate(timeout=100)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(outputs)
    assert "".join(outputs).count("Run folder: ") == 1
    assert "".join(outputs).count("2 processes") == 1
    (metrics,) = tmp_path.rglob("metrics.json")
    assert json.loads(metrics.read_text())["test/num_samples"] == 75


@pytest.mark.slow
@pytest.mark.linux
def test_a_process_ends_with_one_that_died_at_its_start(start_command):
    process = start_command()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        time.sleep(0.02)
    time.sleep(0.5)  # it imports torch
    process.kill()
    assert_none_left(process.pid, 15)
