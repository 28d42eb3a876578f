"""The metrics of each class, and top-k."""

import json
from typing import Any

import pytest
import torch
from example.data.synthetic import SyntheticImages
from paths import script
from test_training import curves
from torchmetrics.classification import MulticlassAccuracy

from lightbase.metrics import in_keys, numbers

HERE = "test_numbers"


class Named(SyntheticImages):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.classes = ["cat", "a b/c", "dog", "d:g"]


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
    assert {f"{stage}_class_acc/cat" for stage in ("train", "val", "test")} <= curves(folder).keys()
    again = script("evaluate").main(["--ckpt_path", str(folder / "checkpoints" / "best.ckpt")])
    assert again == {key: value for key, value in result.items() if key.startswith("test")}


def test_the_values_of_classes_are_those_of_torchmetrics() -> None:
    logits, targets = torch.randn(50, 3), torch.randint(3, (50,))
    values = MulticlassAccuracy(3, average=None)(logits, targets)
    found = numbers({"acc": values}, ["x", "y", "z"])
    for i, name in enumerate("xyz"):
        chosen = targets == i
        assert found[f"acc/{name}"] == pytest.approx(
            (logits.argmax(1)[chosen] == i).float().mean().item()
        )
    assert list(numbers({"acc": values}, [])) == ["acc_0", "acc_1", "acc_2"]
    assert in_keys(["a b", "a/b", "c", "Käse"]) == ["a_b_0", "a_b_1", "c", "Käse"]


def test_top_k_over_the_number_of_classes_is_refused(train, capsys):
    with pytest.raises(SystemExit) as caught:
        train("--model.top_k", 5)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("top_k 5: there are 4 classes; give fewer\n")
