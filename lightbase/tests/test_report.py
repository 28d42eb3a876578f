"""evaluate.py --report: what it says of each class is what test/acc is made of."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from paths import argv, fails, script
from tasks import Scale, Task, flags_of, ious, outputs_of
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from written import checkpoint_file

from lightbase.core.metrics import Accumulator, collection
from lightbase.extras.report import bootstrap

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


def test_intervals_are_those_of_the_binomial_and_of_the_mean() -> None:
    metrics: dict[str, Metric | None] = {
        "acc": MulticlassAccuracy(3, average="micro"),
        "f1": MulticlassF1Score(3, average="micro"),  # the same number
    }
    module = Task(Scale())
    module.curves_callback.means["test"] = Accumulator(collection(metrics), "test/")
    module.criterion = nn.CrossEntropyLoss()
    outputs = torch.randn(1000, 3, generator=torch.Generator().manual_seed(1))
    targets = outputs.argmax(1)
    targets[::10] += 1  # 10 % are wrong
    targets %= 3
    batches = [*zip(outputs.split(300), targets.split(300), strict=True)]
    intervals = bootstrap(module, batches)
    assert bootstrap(module, batches) == intervals
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    deviations = {"test/acc": (0.9 * 0.1) ** 0.5, "test/loss": losses.std().item()}
    means = {"test/acc": 0.9, "test/loss": losses.mean().item()}
    for name, deviation in deviations.items():
        low, high = intervals[name]
        width = 2 * 1.96 * deviation / 1000**0.5
        assert high - low == pytest.approx(width, rel=0.1)
        assert (low + high) / 2 == pytest.approx(means[name], abs=width / 20)
    assert intervals["test/f1"] == pytest.approx(intervals["test/acc"])
    module.criterion = nn.Identity()  # the step computes the loss itself
    assert torch.tensor(bootstrap(module, batches)["test/loss"]).isnan().all()


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
