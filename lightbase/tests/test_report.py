"""evaluate.py --report: what it says of each class is what test/acc is made of."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from paths import argv, fails, script
from tasks import flags_of, ious, outputs_of

evaluate = script("evaluate").main


def read(folder: Path) -> tuple[dict[str, dict[str, str]], list[list[int]]]:
    """report.csv by class, and the counts of confusion_matrix.csv."""
    with (folder / "report.csv").open() as file:
        rows = {row.pop("class"): row for row in csv.DictReader(file)}
    with (folder / "confusion_matrix.csv").open() as file:
        (_, *names), *matrix = csv.reader(file)
    assert names == [row[0] for row in matrix] == list(rows)
    return rows, [list(map(int, row[1:])) for row in matrix]


def test_the_report_agrees_with_the_test(
    trained: Any, tmp_path: Path, capsys: Any
) -> None:
    folder, trained_metrics = trained()
    copied = tmp_path / "copied.ckpt"  # outside of a run's folder
    copied.write_bytes((folder / "checkpoints" / "best.ckpt").read_bytes())
    metrics = evaluate(argv("--ckpt_path", copied, "--report"))
    shown = capsys.readouterr().out.splitlines()
    assert (
        json.loads(shown[-1])
        == metrics
        == {key: trained_metrics[key] for key in metrics}
    )
    rows, counts = read(tmp_path)
    num, right = sum(map(sum, counts)), [counts[i][i] for i in range(4)]
    assert num == metrics["test/num_samples"]
    assert sum(right) / num == pytest.approx(metrics["test/acc"], abs=1e-6)
    for i, row in enumerate(rows.values()):
        precision = right[i] / max(1, sum(line[i] for line in counts))
        recall = right[i] / sum(counts[i])
        f1 = 2 * precision * recall / max(precision + recall, 1e-12)
        values = [float(row[name]) for name in ("precision", "recall", "f1", "support")]
        assert values == pytest.approx([precision, recall, f1, sum(counts[i])])
    table = next(i for i, line in enumerate(shown) if line.startswith("class "))
    row = rows["stripes_0"].values()
    cells = [cell if cell.isdecimal() else f"{float(cell):.4f}" for cell in row]
    assert shown[table + 1].split() == ["stripes_0", *cells]


@pytest.mark.parametrize("task", ["multilabel", "segmentation"])
def test_labels_and_masks_have_their_scores(train, tmp_path, task):
    train(flags_of(task))
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    evaluate(argv("--ckpt_path", path, "--report", tmp_path))
    with (tmp_path / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    x, y = outputs_of(task)
    if task == "segmentation":
        assert [float(row["iou"]) for row in rows] == pytest.approx(ious(x, y))
        assert [int(row["support"]) for row in rows] == [
            (y == i).sum() for i in range(3)
        ]
        assert read(tmp_path)[1][1][1] == ((x.argmax(1) == 1) & (y == 1)).sum()
        return
    right = ((x > 0) & (y > 0)).sum(0)
    for i, row in enumerate(rows):
        assert row["label"] == ("red", "green", "blue")[i]
        precision, recall = right[i] / (x[:, i] > 0).sum(), right[i] / y[:, i].sum()
        values = [float(row[name]) for name in ("precision", "recall", "f1", "support")]
        f1 = 2 * precision * recall / (precision + recall)
        expected = [precision, recall, f1, y[:, i].sum()]
        assert values == pytest.approx([value.item() for value in expected])


def test_what_has_no_report_is_refused(train, tmp_path, capsys):
    train(flags_of("regression"))
    run = tmp_path / "tiny" / "version_0"
    command = argv("--ckpt_path", run / "checkpoints" / "best.ckpt", "--report")
    error = fails(capsys, 2, lambda: evaluate(command))
    assert "the attribute task of Task is regression" in error
    assert not list(tmp_path.rglob("report.csv"))
    error = fails(capsys, 2, lambda: evaluate([*command, str(tmp_path / "below")]))
    assert "below: there is no such folder" in error
