"""The rules of the advice: what they find, and that each names a flag with a value."""

import re
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
    **{"data_loading": 0.1, "transfer_transforms": 0.1, "forward": 0.3, "backward": 0.28},
    **{"optimizer": 0.1, "logging": 0.02, "other": 0.1},
}
NAMES = (
    *("larger batch", "resident data", "workers", "several steps"),
    *("half precision", "compiling", "rarer logging"),
)
ALL = {name: f"{name}: --flag {number}" for number, name in enumerate(NAMES)}


def shares(**given: float) -> dict[str, float]:
    """Those given, the rest spread over the other phases but logging."""
    others = [name for name in EVEN if name not in given and name != "logging"]
    rest = dict.fromkeys(others, (1 - sum(given.values())) / len(others))
    return {"logging": 0.0, **rest, **given}


CASES: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "Steps waited for data 60% of their time": (
        {"busy": 0.4, "shares": shares(data_loading=0.6)},
        ("resident data", "workers"),
    ),
    "Copies and transforms took 50% of a step": (
        {"shares": shares(transfer_transforms=0.5)},
        ("resident data", "larger batch"),
    ),
    "The GPU was busy 20% of the time: steps of 0.60 ms": (
        {"busy": 0.2, "step_ms": 0.6},
        ("several steps", "larger batch"),
    ),
    "Steps of 1.00 ms are small: 62% is overhead": (
        {"step_ms": 1.0, "shares": shares(optimizer=0.35, other=0.27)},
        ("several steps", "larger batch"),
    ),
    "The optimiser took 60% of a step": (
        {"step_ms": 30, "shares": shares(optimizer=0.6)},
        ("larger batch", "compiling"),
    ),
    "The network itself took 80% of a step": (
        {"busy": 0.99, "shares": shares(forward=0.4, backward=0.4)},
        ("half precision", "compiling"),
    ),
}


@pytest.mark.parametrize("finding", CASES)
def test_each_rule_finds_its_case_and_names_the_flags(finding: str) -> None:
    changes, names = CASES[finding]
    facts = Facts(EVEN, 10, ALL)._replace(**changes)
    sentences = advice(facts)
    assert 1 <= len(sentences) <= 2
    assert sentences[0] == f"{finding}; try {', or '.join(ALL[name] for name in names)}"
    without = advice(facts._replace(remedies={name: ALL[name] for name in ALL if name != names[0]}))
    assert ALL[names[0]] not in " ".join(without)


def test_logging_and_the_exchange_of_gradients_have_one_remedy() -> None:
    (logging, *_) = advice(Facts(shares(logging=0.3), 10, ALL))
    assert logging.startswith("Logging and progress bar took 30% of a step; try rare")
    several = Facts(shares(forward=0.1, backward=0.5), 10, ALL, num_processes=2)
    assert "Backward and exchange took 50% of a step; try larger batch" in advice(several)[0]


@pytest.mark.parametrize(
    "facts", [Facts(EVEN, 10, ALL), Facts(EVEN, 1, {}), Facts(shares(other=0.9), 1, {})]
)
def test_where_nothing_stands_out_or_helps_nothing_is_advised(facts: Facts) -> None:
    assert "--" not in "".join(advice(facts))


def test_two_at_most() -> None:
    everything = shares(data_loading=0.4, transfer_transforms=0.4)
    first, second = advice(Facts(everything, 10, ALL, busy=0.1, memory=0.5))
    assert "waited for data" in first
    assert "Copies and transforms" in second


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """One that trained on a pretended GPU, of 8 CPU cores."""
    monkeypatch.setattr("lightbase.watch.advice.obstacle", lambda trainer: None)
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


def found(trainer: Trainer, memory: float = 0.5, logs_each_step: bool = False) -> dict[str, str]:
    return remedies(trainer, Facts(EVEN, 10, {}, memory=memory), logs_each_step)


def test_remedies_name_flags_with_values(trainer: Trainer) -> None:
    texts = found(trainer)
    assert set(texts) == set(NAMES)
    assert set(re.findall(r"--\S+ \S+", " ".join(texts.values()))) == {
        *("--data.batch_size 256", "--data.resident true", "--data.num_workers 0"),
        *("--data.num_workers 4", "--steps_per_execution 20", "--trainer.precision bf16-mixed"),
        *("--model.compile_net inductor", "--trainer.log_every_n_steps 500"),
    }
    assert found(trainer, logs_each_step=True)["rarer logging"] == "self.track in place of self.log"


def test_a_full_gpu_is_not_advised_to_take_more(trainer: Trainer) -> None:
    assert set(NAMES) - set(found(trainer, memory=0.95)) == {"larger batch", "resident data"}


def test_what_is_in_use_or_cannot_be_is_not_advised(trainer, monkeypatch):
    trainer.datamodule.on_gpu = {"train": None}  # type: ignore[attr-defined]
    trainer.strategy._lightning_module.compile_net = "inductor"  # type: ignore[union-attr]
    monkeypatch.setattr("lightbase.watch.advice.obstacle", lambda trainer: "a hook")
    assert set(found(trainer)) == {"larger batch", "half precision", "rarer logging"}
    trainer.strategy._root_device = torch.device("cpu")
    trainer.datamodule = SyntheticImages(num_workers=8)  # type: ignore[attr-defined]
    monkeypatch.setattr("lightbase.watch.advice.has_bf16", lambda: True)
    texts = found(trainer)
    assert {"workers", "compiling", "resident data"}.isdisjoint(texts)
    assert "half precision" in texts
    small_steps = Facts(EVEN, 2, {})
    assert "half precision" not in remedies(trainer, small_steps, False)  # casts cost more


def test_a_gpu_without_bf16_is_advised_fp16_and_files_are_not_kept_on_a_gpu(trainer, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    monkeypatch.setattr(trainer.datamodule, "splits", {"train": DatasetSamples([])})  # type: ignore[attr-defined]
    texts = found(trainer)
    assert texts["half precision"].endswith("--trainer.precision 16-mixed")
    assert "resident data" not in texts


class HparamsData(LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_data_of_ones_own_is_read_by_its_hyper_parameters(trainer: Trainer) -> None:
    trainer.datamodule = HparamsData(batch_size=8)  # type: ignore[attr-defined]
    texts = found(trainer)
    assert texts["larger batch"].endswith("--data.batch_size 32")
    assert texts["workers"] == "more num_workers for the DataLoader of HparamsData"


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
    tmp_path, monkeypatch, capsys
):
    seen: list[Facts] = []
    monkeypatch.setattr(
        "lightbase.run.train.advice", lambda facts: seen.append(facts) or advice(facts)
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = tmp_path / "stock.yaml"
    config.write_text(
        "model: test_advice.Stock\ndata: test_advice.StockData\ntrainer: {accelerator: cpu, "
        "max_epochs: 1}"
    )
    main(["--config", str(config), "--trainer.default_root_dir", str(tmp_path)])
    (facts,) = seen
    assert facts.shares["logging"] > 0.1
    assert facts.step_ms > 0
    assert facts.busy is None
    assert facts.remedies["several steps"].endswith("--steps_per_execution 20")
    assert facts.remedies["fused optimiser"] == "Adam(..., fused=True)"
    assert facts.remedies["rarer logging"] == "self.log in every 100th batch"
    assert "BaseDataModule" in facts.remedies["tensors"]
    assert "workers" not in facts.remedies
    assert "self.log in every 100th batch" in capsys.readouterr().out


def test_self_log_on_log_steps_alone_is_not_advised_against(train, monkeypatch):
    seen: list[Facts] = []
    monkeypatch.setattr(
        "lightbase.run.train.advice", lambda facts: seen.append(facts) or ["nothing"]
    )
    train("--step_timer", "true", "--trainer.max_epochs", 1, "--trainer.limit_test_batches", 1)
    assert seen[0].remedies["rarer logging"].startswith("logging less often: --trainer.log_every")
