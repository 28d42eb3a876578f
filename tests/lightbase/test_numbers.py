"""Numbers that people look at: accuracy of each class, top-k, the norm of gradients, histograms of
weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example.data.synthetic import SyntheticImages
from lightning import Callback
from paths import script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics.classification import MulticlassAccuracy

from lightbase.curves import gather
from lightbase.metrics import in_keys, numbers

Train = Callable[..., dict[str, Any]]
HERE = "test_numbers"
NORM = "watch/gradient/norm"


class Named(SyntheticImages):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.classes = ["cat", "a b/c", "dog", "d:g"]


class Norms(Callback):
    """What the optimiser is about to get, of each step."""

    found: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        Norms.found = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        squares = sum(
            float((parameter.grad.double() ** 2).sum()) for parameter in pl_module.parameters()
        )
        Norms.found.append(squares**0.5)


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def norms_of(folder: Path) -> dict[int, float]:
    return {event.step: event.value for event in events_of(folder).Scalars(NORM)}


def test_each_class_has_an_accuracy_beside_the_usual_one(train, tmp_path, capsys):
    train("--data", f"{HERE}.Named", "--trainer.max_epochs", 1)
    # the checkpoint of a run without them resumes with them
    flags = ("--model.per_class", "true", "--model.top_k", 2)
    result = train("--ckpt_path", "last", *flags, "--trainer.max_epochs", 3)
    shown = capsys.readouterr().out
    names = [f"test_class_acc/{name}" for name in ("cat", "a_b_c", "dog", "d_g")]
    assert set(names) == {key for key in result if key.startswith("test_class_acc")}
    assert result["test/acc"] <= result["test/top2"] <= 1
    lines = [line.split() for line in shown.splitlines() if line.startswith("  test_class_acc/")]
    assert [float(value) for _, value in lines] == sorted(float(value) for _, value in lines)
    assert "class_acc" not in "".join(
        line for line in shown.splitlines() if line.startswith(("Epoch", "Test"))
    )
    folder = tmp_path / "tiny" / "version_0"
    assert json.loads((folder / "metrics.json").read_text()) == result
    tags = events_of(folder).Tags()["scalars"]
    assert {f"{stage}_class_acc/cat" for stage in ("train", "val", "test")} <= set(tags)
    again = script("evaluate").main(["--ckpt_path", str(folder / "checkpoints" / "best.ckpt")])
    assert again == {key: value for key, value in result.items() if key.startswith("test")}


def test_the_values_of_classes_are_those_of_torchmetrics() -> None:
    logits, targets = torch.randn(50, 3), torch.randint(3, (50,))
    values = MulticlassAccuracy(3, average=None)(logits, targets)
    found = numbers({"acc": values}, ["x", "y", "z"], set())
    for i, name in enumerate("xyz"):
        chosen = targets == i
        assert found[f"acc/{name}"] == pytest.approx(
            (logits.argmax(1)[chosen] == i).float().mean().item()
        )
    assert list(numbers({"acc": values}, [], set())) == ["acc_0", "acc_1", "acc_2"]
    assert in_keys(["a b", "a/b", "c", "Käse"]) == ["a_b_0", "a_b_1", "c", "Käse"]


def test_top_k_over_the_number_of_classes_is_refused(train, capsys):
    with pytest.raises(SystemExit) as caught:
        train("--model.top_k", 5)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("top_k 5: there are 4 classes; give fewer\n")


@pytest.mark.parametrize(
    "flags",
    [(), ("--trainer.accumulate_grad_batches", 2, "--trainer.gradient_clip_val", 0.001)],
    ids=["plain", "accumulated and clipped"],
)
def test_the_gradient_norm_is_what_the_step_gets_before_clipping(train, tmp_path, flags):
    watched = f"--gradient_norm true --trainer.callbacks {HERE}.Norms --trainer.max_epochs 1"
    train(*flags, *watched.split())
    found = norms_of(tmp_path / "tiny" / "version_0")
    num_steps = len(Norms.found)
    assert sorted(found) == list(range(4, num_steps, 5))
    assert found == pytest.approx({step: Norms.found[step] for step in found}, rel=1e-5)
    assert min(found.values()) > 0.01


@pytest.mark.slow
def test_several_steps_in_one_turn_have_the_norm_of_one_of_them(train, tmp_path, capsys):
    train("--gradient_norm", "true", "--trainer.log_every_n_steps", 1)
    several = ("--steps_per_execution", 4, "--histograms_every_n_epochs", 1)
    train("--gradient_norm", "modules", *several, "--trainer.log_every_n_steps", 5)
    assert "One step at a time" not in capsys.readouterr().out
    every, some = (norms_of(tmp_path / "tiny" / f"version_{i}") for i in (0, 1))
    assert len(every) == 38
    assert 5 <= len(some) <= 8
    assert some == pytest.approx({step: every[step] for step in some}, rel=1e-4)
    events = events_of(tmp_path / "tiny" / "version_1")
    parts = [tag for tag in events.Tags()["scalars"] if tag.startswith(f"{NORM}_")]
    for point in events.Scalars(NORM):
        squares = sum(
            {p.step: p.value for p in events.Scalars(part)}[point.step] ** 2 for part in parts
        )
        assert squares**0.5 == pytest.approx(point.value, rel=1e-4)
    histograms = [tag for tag in events.Tags()["histograms"] if tag.startswith("weights/")]
    assert [event.step for event in events.Histograms(histograms[0])] == [18, 37]
    weights = torch.load(
        tmp_path / "tiny" / "version_1" / "checkpoints" / "last.ckpt", weights_only=True
    )["state_dict"]
    assert sorted(histograms) == sorted(f"weights/{name.removeprefix('net.')}" for name in weights)
    last = events.Histograms(histograms[0])[-1].histogram_value
    weight = weights[histograms[0].replace("weights/", "net.")]
    assert (last.num, last.min, last.max) == pytest.approx(
        (weight.numel(), float(weight.min()), float(weight.max()))
    )


class LoggedNorms(Norms):
    """As a curve, and equal in all processes."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        assert len({round(norm, 5) for norm in gather(Norms.found[-1])}) == 1
        pl_module.log("own", Norms.found[-1], rank_zero_only=True)


@pytest.mark.slow
def test_ddp_has_the_norm_of_the_gradient_of_all_processes(train: Train, tmp_path: Path) -> None:
    flags = "--gradient_norm true --histograms_every_n_epochs 1 --trainer.log_every_n_steps 1"
    several = "--trainer.max_steps 3 --trainer.devices 2 --trainer.strategy ddp_fork"
    train(*flags.split(), *several.split(), "--trainer.callbacks", f"{HERE}.LoggedNorms")
    folder = tmp_path / "tiny" / "version_0"
    own = {event.step: event.value for event in events_of(folder).Scalars("own")}
    assert sorted(own) == [0, 1, 2]
    assert norms_of(folder) == pytest.approx(own, rel=1e-5)
