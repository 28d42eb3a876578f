"""evaluate.py --report: what it says of each class is what test/acc is made of."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import argv, script
from ranks import on_ranks
from scipy import stats
from tasks import Outputs, ends_of, flags_of, ious, measured, outputs_of
from torch import Tensor, nn
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassCohenKappa,
    MulticlassF1Score,
    MulticlassRecall,
)
from written import checkpoint_file

from lightbase.model.intervals import intervals

evaluate = script("evaluate").main


def read(file: Path) -> tuple[list[str], Tensor]:
    """Return the names in the first column of a CSV file, and its numbers."""
    with file.open() as lines:
        (_, *rows) = csv.reader(lines)
    numbers = [list(map(float, row[1:])) for row in rows]
    return [row[0] for row in rows], torch.tensor(numbers)


def assert_scores(rows: Tensor, right: Tensor, support: Tensor, num: Tensor) -> None:
    """Check the columns precision, recall, F1 and support. num: the predictions of each
    class."""
    precision, recall = right / num.clamp(min=1), right / support
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
    torch.testing.assert_close(rows, torch.stack([precision, recall, f1, support], 1))


def test_the_report_agrees_with_the_test(trained, tmp_path, capsys):
    folder, trained_metrics = trained()
    copied = tmp_path / "copied.ckpt"  # outside of a run's folder
    copied.write_bytes(checkpoint_file(folder).read_bytes())
    metrics = evaluate(argv("--ckpt_path", copied, "--report"))
    shown = capsys.readouterr().out.splitlines()
    assert metrics.items() <= trained_metrics.items()
    names, counts = read(tmp_path / "confusion_matrix.csv")
    assert counts.sum() == metrics["test/num_samples"]
    right = counts.diag()
    assert right.sum() / counts.sum() == pytest.approx(metrics["test/acc"], abs=1e-6)
    classes, rows = read(tmp_path / "report.csv")
    assert classes == names
    assert_scores(rows, right, counts.sum(1), counts.sum(0))
    names, ends = read(tmp_path / "intervals.csv")
    for name, (value, low, high) in zip(names, ends.tolist(), strict=True):
        assert value == pytest.approx(metrics[name])
        assert low <= value <= high
        cells = [f"{x:.4g}" for x in (value, low, high)]
        assert [name, *cells] in [line.split() for line in shown]
    assert {*names} == {"test/acc", "test/loss"}


@pytest.mark.parametrize("task", ["multilabel", "segmentation"])
def test_labels_and_masks_have_their_scores(train, tmp_path, task):
    train(flags_of(task))
    path = checkpoint_file(tmp_path / "tiny" / "version_0")
    evaluate(argv("--ckpt_path", path, "--report", tmp_path / "new"))
    _, rows = read(tmp_path / "new" / "report.csv")
    x, y = outputs_of(task)
    if task == "segmentation":
        assert rows[:, 0].tolist() == pytest.approx(ious(x, y))
        assert rows[:, 1].tolist() == [(y == i).sum() for i in range(3)]
        _, counts = read(tmp_path / "new" / "confusion_matrix.csv")
        assert counts[1, 1] == ((x.argmax(1) == 1) & (y == 1)).sum()
    else:
        x, y = x > 0, y > 0
        assert_scores(rows, (x & y).sum(0), y.sum(0), x.sum(0))


def mistaken(num: int, every: int, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    """Return logits and targets of which each `every`-th one is predicted wrong."""
    outputs = torch.randn(num, num_classes, generator=torch.Generator().manual_seed(1))
    targets = outputs.argmax(1)
    targets[::every] += 1
    return outputs, targets % num_classes


def test_intervals_are_wilsons_and_those_of_the_mean() -> None:
    metrics = {
        "acc": MulticlassAccuracy(3, average="micro"),
        "recall": MulticlassRecall(3, average=None),
        "auroc": MulticlassAUROC(3),  # its states are no sums
        "ece": MulticlassCalibrationError(3),
    }
    module = measured(metrics, nn.CrossEntropyLoss())
    outputs, targets = mistaken(1000, 10)
    ends = ends_of(module, outputs, targets)
    acc = stats.binomtest(900, 1000).proportion_ci(method="wilson")
    assert ends["test/acc"] == pytest.approx(tuple(acc), abs=1e-6)
    is_one = targets == 1
    right = int((outputs.argmax(1) == 1)[is_one].sum())
    recall = stats.binomtest(right, int(is_one.sum())).proportion_ci(method="wilson")
    assert ends["test/recall_1"] == pytest.approx(tuple(recall), abs=2e-3)
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    radius = 1.96 * losses.std().item() / 1000**0.5
    low, high = ends["test/loss"]
    assert high - low == pytest.approx(2 * radius, rel=0.02)
    assert (low + high) / 2 == pytest.approx(losses.mean().item(), rel=0.01)
    low, high = ends["test/auroc"]
    assert low < MulticlassAUROC(3)(outputs, targets) < high < low + 0.05
    assert "test/ece" not in ends


def test_a_value_of_1_has_an_interval_and_a_rare_class_a_wide_one() -> None:
    """40 samples, of which 3 are of class 1, and no mistake."""
    metrics = {
        "acc": MulticlassAccuracy(2, average="micro"),
        "f1": MulticlassF1Score(2),
        "auroc": MulticlassAUROC(2),
        "kappa": MulticlassCohenKappa(2),
    }
    targets = (torch.arange(40) < 3).long()
    outputs = 9 * nn.functional.one_hot(targets, 2) + torch.rand(40, 2)
    ends = ends_of(measured(metrics), outputs, targets)
    rare = 3 / (3 + 1.96**2)
    for name, low in {
        "acc": 40 / (40 + 1.96**2),
        "f1": rare,
        "auroc": rare,
        "kappa": 2 * rare - 1,
    }.items():
        assert ends[f"test/{name}"] == pytest.approx((low, 1), abs=1e-4)


def test_parts_without_which_a_metric_is_undefined_are_left_out(capsys) -> None:
    outputs, targets = mistaken(40, 5, 2)
    targets[:] = 0
    targets[7] = 1
    ends = ends_of(measured({"auroc": MulticlassAUROC(2)}), outputs, targets)
    assert np.isfinite(ends["test/auroc"]).all()
    assert "leaves out 1 of 40 parts of the test" in capsys.readouterr().out


def test_samples_of_a_group_are_drawn_together() -> None:
    """All samples of a group are right, or all are wrong."""
    groups = np.repeat(np.arange(30), 10)
    outputs = torch.eye(2)[torch.zeros(300, dtype=torch.int64)]
    targets = torch.as_tensor(groups % 3 == 0).long()
    module = measured({"acc": MulticlassAccuracy(2, average="micro")})
    low, high = ends_of(module, outputs, targets, groups)["test/acc"]
    square = stats.t.ppf(0.975, 29) ** 2
    radius = (square * (square + 4 * 30 * 2 / 9)) ** 0.5 / (2 * (30 + square))
    assert high - low == pytest.approx(2 * radius, rel=1e-3)


class Patients(Outputs):
    """Each four samples are of one patient."""

    def load(self, split: str) -> Any:  # type: ignore[override]
        x, y = super().load("all")
        patients = torch.arange(40) // 4
        rows = self.seeded_part(40, split, patients)  # type: ignore[arg-type]
        return x[rows], y[rows]


@pytest.mark.parametrize("data", ["test_report.Patients", "tasks.Outputs"])
def test_the_report_knows_the_groups_of_the_test(train, tmp_path, monkeypatch, data):
    known: list[Any] = []

    def remember(*args: Any) -> dict[str, Any]:
        known.append(args[4])
        return intervals(*args)

    monkeypatch.setattr("lightbase.commands.evaluate.intervals", remember)
    has_groups = data == "test_report.Patients"
    split = "--data.val_split grouped" if has_groups else ""
    train(f"{flags_of('multilabel', data=data)} {split}")
    path = checkpoint_file(tmp_path / "tiny" / "version_0")
    evaluate(argv("--ckpt_path", path, "--report"))
    (groups,) = known
    if has_groups:
        assert np.bincount(groups).tolist() == [4, 4]
    else:
        assert groups is None


@pytest.mark.slow
@pytest.mark.linux
def test_the_intervals_are_the_same_with_two_processes(trained, tmp_path) -> None:
    folder, _ = trained()
    ends = []
    for number in (1, 2):
        out = tmp_path / str(number)
        words = argv("--ckpt_path", checkpoint_file(folder), "--report", out)
        if number == 1:
            evaluate(words)
        else:
            words += ["--trust_checkpoint", "true"]
            result = on_ranks(tmp_path, 2, "test_report.evaluate_on_rank", *words)
            assert not any(result.statuses), result.outputs
        ends.append(read(out / "intervals.csv")[1][:, 1:])
    # a batch of another size may be computed by another kernel
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


def evaluate_on_rank(*words: str) -> None:
    evaluate([*words])


def test_a_line_says_that_a_network_may_be_no_better_than_a_constant(
    train, tmp_path, capsys
):
    train("--model.lr 1e-9 --seed_everything 8")
    ending = capsys.readouterr().out
    path = checkpoint_file(tmp_path / "tiny" / "version_0")
    metrics = evaluate(argv("--ckpt_path", path, "--report", tmp_path / "new"))
    score = metrics["test/acc_largest_class"]
    assert f"(the largest class alone: {score:.4g})" in ending
    shown = capsys.readouterr().out
    assert f"test/acc: the interval contains {score:.4g}" in shown
