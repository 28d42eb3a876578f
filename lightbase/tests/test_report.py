"""evaluate.py --report: what it says of each class is what test/acc is made of."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import HERE, argv, fails, script
from scipy import stats
from tasks import Outputs, ends_of, flags_of, ious, measured, outputs_of
from torch import Tensor, nn
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
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
    assert json.loads(shown[-1]) == metrics
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
    assert {*names} == metrics.keys() - {"test/num_samples"}
    (line,) = [line for line in shown if line.startswith("stripes_0")]
    cells = [f"{x:.4g}" for x in rows[0, :3].tolist()]
    assert line.split() == ["stripes_0", *cells, f"{rows[0, 3]:.0f}"]


@pytest.mark.parametrize("task", ["multilabel", "segmentation"])
def test_labels_and_masks_have_their_scores(train, tmp_path, task):
    train(flags_of(task))
    path = checkpoint_file(tmp_path / "tiny" / "version_0")
    evaluate(argv("--ckpt_path", path, "--report", tmp_path / "new"))
    names, rows = read(tmp_path / "new" / "report.csv")
    assert names == ["red", "green", "blue"]
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
    assert ends_of(module, outputs, targets) == ends
    acc = stats.binomtest(900, 1000).proportion_ci(method="wilson")
    assert ends["test/acc"] == pytest.approx(tuple(acc), abs=1e-6)
    is_one = targets == 1
    right = int((outputs.argmax(1) == 1)[is_one].sum())
    recall = stats.binomtest(right, int(is_one.sum())).proportion_ci(method="wilson")
    assert ends["test/recall_1"] == pytest.approx(tuple(recall), abs=2e-3)
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    low, high = ends["test/loss"]
    assert high - low == pytest.approx(
        2 * 1.96 * losses.std().item() / 1000**0.5, rel=0.02
    )
    assert (low + high) / 2 == pytest.approx(losses.mean().item(), rel=0.01)
    low, high = ends["test/auroc"]
    assert low < MulticlassAUROC(3)(outputs, targets) < high < low + 0.05
    assert "test/ece" not in ends
    module.criterion = nn.Identity()  # the step computes the loss itself
    assert np.isnan(ends_of(module, outputs, targets)["test/loss"]).all()


def test_a_value_of_1_has_an_interval_and_a_rare_class_a_wide_one() -> None:
    """40 samples, of which 3 are of class 1, and no mistake."""
    metrics = {
        "acc": MulticlassAccuracy(2, average="micro"),
        "f1": MulticlassF1Score(2),
        "class_f1": MulticlassF1Score(2, average=None),
        "auroc": MulticlassAUROC(2),
        "ap": MulticlassAveragePrecision(2),
        "kappa": MulticlassCohenKappa(2),
    }
    targets = (torch.arange(40) < 3).long()
    outputs = 9 * nn.functional.one_hot(targets, 2) + torch.rand(40, 2)
    ends = ends_of(measured(metrics), outputs, targets)
    low = {name.removeprefix("test/"): low for name, (low, _) in ends.items()}
    assert low["acc"] == pytest.approx(40 / (40 + 1.96**2), abs=1e-4)
    del low["acc"], low["loss"], ends["test/loss"]
    rare = 3 / (3 + 1.96**2)
    assert low.pop("kappa") == pytest.approx(2 * rare - 1, abs=1e-4)
    assert [*low.values()] == pytest.approx([rare] * 5, abs=1e-4)
    assert [high for _, high in ends.values()] == pytest.approx([1] * 7)


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


def test_the_report_knows_the_groups_of_the_test(train, tmp_path, capsys, monkeypatch):
    known: list[Any] = []

    def remember(*args: Any) -> dict[str, Any]:
        known.append(args[4])
        return intervals(*args)

    monkeypatch.setattr("lightbase.commands.evaluate.intervals", remember)
    for data, is_known in (("test_report.Patients", True), ("tasks.Outputs", False)):
        train(
            flags_of("multilabel", data=data),
            "--data.val_split",
            "grouped" if is_known else "random",
        )
        path = max(tmp_path.glob("tiny/*/checkpoints/best.ckpt"))
        evaluate(argv("--ckpt_path", path, "--report"))
    assert len({*known[0].tolist()}) == 2
    assert np.bincount(known[0]).tolist() == [4, 4]
    assert known[1] is None


@pytest.mark.slow
def test_the_intervals_are_the_same_with_two_processes(trained, tmp_path) -> None:
    folder, _ = trained()
    ends = []
    for devices in ("1", "2 --trainer.strategy ddp"):
        out = tmp_path / devices[0]
        flags = f"--trust_checkpoint true --trainer.devices {devices} --report"
        words = argv("--ckpt_path", checkpoint_file(folder), flags, out)
        command = [sys.executable, "scripts/evaluate.py", *words]
        subprocess.run(command, cwd=HERE, check=True, capture_output=True)
        ends.append(read(out / "intervals.csv")[1][:, 1:].tolist())
    assert ends[0] == ends[1]


def test_what_has_no_report_is_refused(train, tmp_path, capsys):
    for flags, message in (
        (flags_of("regression"), "--report: Task predicts no classes"),
        (
            f"{flags_of('text')} --model.task multiclass --name misfit",
            "what test_step gives track does not fit task multiclass",
        ),
    ):
        train(flags)
        (path,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
        command = argv("--ckpt_path", path, "--report")
        assert message in fails(capsys, 2, lambda words=command: evaluate(words))
        shutil.rmtree(path.parents[2])
