"""The rules of the advice: what they find, and that each names a flag with a value."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightbase.data.batches import DatasetSamples
from lightbase.run.train import main
from lightbase.watch.advice import Facts, advice, remedies

EVEN = {
    "data_loading": 0.1, "transfer_transforms": 0.1, "forward": 0.3, "backward": 0.28,
        "optimizer": 0.1,
    "logging": 0.02, "other": 0.1,
}  # fmt: skip
NAMES = (
    *("larger batch", "smaller batch", "resident data", "workers", "several steps"),
    *("half precision", "compiling", "rarer logging", "rarer exchanges", "rarer calls"),
)
ALL = {name: f"{name}: --flag {number}" for number, name in enumerate(NAMES)}


def shares(**given: float) -> dict[str, float]:
    """Those given, the rest spread over the other phases but logging."""
    others = [name for name in EVEN if name not in given and name != "logging"]
    return {
        "logging": 0.0,
        **dict.fromkeys(others, (1 - sum(given.values())) / len(others)),
        **given,
    }


CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"busy": 0.9, "memory": 0.97}, "GPU memory was 97% full", ["smaller batch", "half precision"]),
    ({"busy": 0.4, "shares": shares(data_loading=0.6)}, "waited for data "
        "60%", ["resident data", "workers"]),
    ({"shares": shares(transfer_transforms=0.5)}, "Copies to the "
        "device", ["resident data", "larger batch"]),
    ({"shares": shares(logging=0.3)}, "Logging and the progress bar took 30%", ["rarer logging"]),
    ({"shares": shares(logging=0.3), "logs_each_step": True}, "Logging and the progress bar "
        "took 30%", ["rarer calls"]),
    ({"num_processes": 2, "shares": shares(forward=0.1, backward=0.6)}, "with the exchange of "
        "gradients, took 60%",
     ["larger batch", "rarer exchanges"]),
    ({"busy": 0.2, "step_ms": 0.6}, "The GPU was busy 20% of the time: steps of 0.60 ms",
     ["several steps", "larger batch"]),
    ({"step_ms": 1.0, "shares": shares(optimizer=0.35)}, "Steps of 1.00 ms are small",
     ["several steps", "larger batch"]),
    ({"step_ms": 30, "shares": shares(optimizer=0.6)}, "The optimiser took "
        "60%", ["larger batch", "compiling"]),
    ({"busy": 0.99, "shares": shares(forward=0.4, backward=0.4)}, "The network itself took 80%",
     ["half precision", "compiling"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "finding", "names"), CASES)
def test_each_rule_finds_its_case_and_names_the_flags(
    changes: dict[str, Any], finding: str, names: list[str]
) -> None:
    facts = Facts(EVEN, 10, ALL)._replace(**changes)
    sentences = advice(facts)
    assert 1 <= len(sentences) <= 2
    assert finding in sentences[0]
    assert sentences[0].endswith("; try " + ", or ".join(ALL[name] for name in names))
    assert "\n" not in "".join(sentences)
    without = advice(facts._replace(remedies={name: ALL[name] for name in ALL if name != names[0]}))
    assert ALL[names[0]] not in " ".join(without)


@pytest.mark.parametrize(
    "facts", [Facts(EVEN, 10, ALL), Facts(EVEN, 1, {}), Facts(shares(other=0.9), 1, {})]
)
def test_where_nothing_stands_out_or_helps_nothing_is_advised(facts: Facts) -> None:
    assert "--" not in "".join(advice(facts))


def test_a_finding_without_a_flag_is_told_all_the_same() -> None:
    (sentence,) = advice(Facts(shares(data_loading=0.55), 10, {}))
    assert sentence == "Steps waited for data 55% of their time"
    (sentence,) = advice(Facts(shares(forward=0.4, backward=0.4), 30, {}))
    assert sentence.startswith(
        "The network itself took 80% of the time of steps: a smaller network"
    )


def test_half_precision_is_not_for_a_small_network_on_a_cpu() -> None:
    computing = shares(forward=0.4, backward=0.4)
    (small,), (large,) = (advice(Facts(computing, step_ms, ALL)) for step_ms in (2, 30))
    assert ALL["half precision"] not in small
    assert small.endswith(ALL["larger batch"])
    assert ALL["half precision"] in large


def test_tensors_behind_a_stock_loader_are_worth_a_word_earlier() -> None:
    facts = Facts(shares(data_loading=0.15), 10, {**ALL, "tensors": "the tensors"})
    assert (
        advice(facts)[0]
        == f"Steps waited for data 15% of their time; try the tensors, or {ALL['resident data']}"
    )


def test_two_at_most() -> None:
    everything = shares(data_loading=0.4, transfer_transforms=0.4)
    first, second = advice(Facts(everything, 10, ALL, busy=0.1, memory=0.5))
    assert "waited for data" in first
    assert "Copies to the device" in second


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """One that trained on a pretended GPU, of 8 CPU cores."""
    monkeypatch.setattr("lightbase.watch.advice.obstacle", lambda trainer: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, accumulate_grad_batches=2
    )
    trainer.strategy._root_device = torch.device("cuda")
    trainer.strategy._lightning_module = Classifier(nn.Flatten())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    trainer.datamodule = SyntheticImages(num_train=10, batch_size=64, num_workers=2)  # type: ignore[attr-defined]
    trainer.datamodule.setup("validate")  # type: ignore[attr-defined]
    return trainer


def flags(found: dict[str, str]) -> set[str]:
    return set(re.findall(r"--\S+ \S+", " ".join(found.values())))


def test_remedies_name_flags_with_values(trainer: Trainer) -> None:
    assert set(remedies(trainer, memory=0.5)) == set(NAMES)
    assert flags(remedies(trainer, memory=0.5)) == {
        *(
            "--data.batch_size 256",
            "--data.batch_size 32",
            "--data.resident true",
            "--data.num_workers 0",
        ),
        "--data.num_workers 4",
        *(
            "--steps_per_execution 20",
            "--trainer.precision bf16-mixed",
            "--model.compile_net inductor",
        ),
        *("--trainer.log_every_n_steps 500", "--trainer.accumulate_grad_batches 8"),
        "--trainer.accumulate_grad_batches 4",
    }


def test_a_full_gpu_is_not_advised_to_take_more(trainer: Trainer) -> None:
    assert set(NAMES) - set(remedies(trainer, memory=0.95)) == {"larger batch", "resident data"}


def test_what_is_in_use_or_cannot_be_is_not_advised(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.datamodule.on_gpu = {"train": None}  # type: ignore[attr-defined]
    trainer.datamodule.batch_size = 1  # type: ignore[attr-defined]
    trainer.strategy._lightning_module.compile_net = "inductor"  # type: ignore[union-attr]
    monkeypatch.setattr("lightbase.watch.advice.obstacle", lambda trainer: "a hook")
    found = remedies(trainer, memory=0.5)
    assert set(found) == {
        "larger batch",
        "half precision",
        "rarer logging",
        "rarer exchanges",
        "rarer calls",
    }
    trainer.strategy._root_device = torch.device("cpu")
    trainer.datamodule = SyntheticImages(num_workers=8)  # type: ignore[attr-defined]
    assert {"workers", "compiling", "resident data"}.isdisjoint(remedies(trainer, memory=0.5))


def test_a_gpu_without_bf16_is_advised_fp16_and_files_are_not_kept_on_a_gpu(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    monkeypatch.setattr(trainer.datamodule, "splits", {"train": DatasetSamples([], True)})  # type: ignore[attr-defined]
    found = remedies(trainer, memory=0.5)
    assert found["half precision"].endswith("--trainer.precision 16-mixed")
    assert "resident data" not in found


class HparamsData(LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_data_of_ones_own_is_read_by_its_hyper_parameters(trainer: Trainer) -> None:
    trainer.datamodule = HparamsData(batch_size=8)  # type: ignore[attr-defined]
    found = remedies(trainer, memory=0.5)
    assert found["larger batch"].endswith("--data.batch_size 32")
    assert found["workers"] == "more num_workers for the DataLoader of HparamsData"


class OwnData(LightningDataModule):
    """Without any of the arguments that our data modules have."""

    def train_dataloader(self) -> Any:
        return DataLoader(
            TensorDataset(torch.rand(40, 3, 8, 8), torch.randint(4, (40,))), batch_size=8
        )

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_facts_of_data_and_a_model_of_ones_own(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Facts] = []
    monkeypatch.setattr(
        "lightbase.run.train.advice", lambda facts: found.append(facts) or ["nothing"]
    )
    flags = ("--step_timer", "true", "--trainer.max_epochs", 1, "--trainer.limit_test_batches", 1)
    train(*flags)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    train(*flags, "--data", "test_advice.OwnData")
    assert not found[0].logs_each_step  # the flag does, in tests/tiny.yaml or here
    assert found[0].remedies["larger batch"].endswith("--data.batch_size 64")
    assert "larger batch" not in found[1].remedies
    assert all(
        facts.step_ms > 0 and 0 <= facts.shares["forward"] <= 1 and facts.busy is None
        for facts in found
    )


class Stock(LightningModule):
    """As Lightning's pages write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        self.log("train_loss_twice", 2 * loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class StockData(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(
            TensorDataset(torch.rand(400, 3, 8, 8), torch.randint(4, (400,))), batch_size=4
        )


def test_a_plain_module_in_the_usual_style_hears_what_its_style_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Facts] = []
    monkeypatch.setattr(
        "lightbase.run.train.advice", lambda facts: found.append(facts) or advice(facts)
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = tmp_path / "stock.yaml"
    config.write_text(
        "model: test_advice.Stock\ndata: test_advice.StockData\ntrainer: {accelerator: cpu, "
        "max_epochs: 1}"
    )
    main(["--config", str(config), "--trainer.default_root_dir", str(tmp_path)])
    (facts,) = found
    assert facts.logs_each_step
    assert facts.shares["logging"] > 0.1
    assert facts.remedies["several steps"].endswith("--steps_per_execution 20")
    assert facts.remedies["fused optimiser"] == "Adam(..., fused=True)"
    assert facts.remedies["rarer calls"] == "self.log in every 100th batch alone"
    assert "BaseDataModule" in facts.remedies["tensors"]
    assert "workers" not in facts.remedies
    assert "self.log in every 100th batch alone" in capsys.readouterr().out
