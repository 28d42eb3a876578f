"""evaluate.py --report: what it says of each class is what test/acc is made of."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from example.classifier import Classifier
from paths import TINY, argv, script

from lightbase.run.train import main

evaluate = script("evaluate").main


class Silent(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().test_step(batch, batch_idx)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("run")
    metrics = main(["--config", TINY, "--trainer.default_root_dir", str(root)])
    return root / "tiny" / "version_0", metrics


def read(folder: Path) -> tuple[dict[str, dict[str, str]], list[list[int]]]:
    """report.csv by class, and the counts of confusion_matrix.csv."""
    with (folder / "report.csv").open() as file:
        rows = {row.pop("class"): row for row in csv.DictReader(file)}
    with (folder / "confusion_matrix.csv").open() as file:
        (_, *names), *matrix = csv.reader(file)
    assert names == [row[0] for row in matrix] == list(rows)
    return rows, [list(map(int, row[1:])) for row in matrix]


def test_the_report_agrees_with_the_test(run: Any, tmp_path: Path, capsys: Any) -> None:
    path = str(run[0] / "checkpoints" / "best.ckpt")
    metrics = evaluate(["--ckpt_path", path, "--report", str(tmp_path / "a" / "b")])
    shown = capsys.readouterr().out.splitlines()
    assert json.loads(shown[-1]) == metrics == {key: run[1][key] for key in metrics}
    rows, counts = read(tmp_path / "a" / "b")
    num, right = sum(map(sum, counts)), [counts[i][i] for i in range(4)]
    assert num == metrics["test/num_samples"]
    assert sum(right) / num == pytest.approx(metrics["test/acc"], abs=1e-6)
    for i, row in enumerate(rows.values()):
        precision = right[i] / max(1, sum(line[i] for line in counts))
        recall = right[i] / sum(counts[i])
        assert int(row["support"]) == sum(counts[i])
        assert float(row["precision"]) == pytest.approx(precision)
        assert float(row["recall"]) == pytest.approx(recall)
        f1 = 2 * precision * recall / max(precision + recall, 1e-12)
        assert float(row["f1"]) == pytest.approx(f1)
    table = next(i for i, line in enumerate(shown) if line.startswith("class "))
    cells = [
        cell if cell.isdecimal() else f"{float(cell):.4f}" for cell in rows["stripes_0"].values()
    ]
    assert shown[table + 1].split() == ["stripes_0", *cells]
    assert f"Accuracy {metrics['test/acc']:.4f} of 75 samples" in shown[table + 5]


def test_it_takes_the_views_and_the_part_that_are_tested(run: Any, tmp_path: Path) -> None:
    flags = argv(
        "--model.test_views lightbase.data.transforms.mirrored --trainer.limit_test_batches 3"
    )
    path = str(run[0] / "checkpoints" / "best.ckpt")
    metrics = evaluate(["--ckpt_path", path, *flags, "--report", str(tmp_path)])
    _, counts = read(tmp_path)
    assert sum(map(sum, counts)) == metrics["test/num_samples"] == 48
    assert sum(counts[i][i] for i in range(4)) / 48 == pytest.approx(metrics["test/acc"], abs=1e-6)


def test_it_lies_in_the_runs_folder_or_beside_a_checkpoint_elsewhere(run, tmp_path, capsys):
    best = run[0] / "checkpoints" / "best.ckpt"
    copied = tmp_path / "copied.ckpt"
    copied.write_bytes(best.read_bytes())
    for path, folder in ((best, run[0]), (copied, tmp_path)):
        evaluate(["--ckpt_path", str(path), "--report"])
        assert (
            f"Report: {folder / 'report.csv'} and confusion_matrix.csv" in capsys.readouterr().out
        )
        assert (folder / "report.csv").is_file()
        assert (folder / "confusion_matrix.csv").is_file()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--model", "test_report.Silent"], "test_step of Silent returns NoneType"),
        (
            argv(
                "--model example.regressor.Regressor --data small.Numbers --model.net.sizes [10,1]"
            ),
            "float",
        ),
    ],
    ids=["no_logits", "numbers"],
)
def test_what_has_no_classes_is_refused(tmp_path, capsys, flags, what):
    config = tmp_path / "tiny.yaml"
    text = Path(TINY).read_text()
    if "small.Numbers" in flags:
        text = text[: text.index("data:")] + text[text.index("# what watches") :]
    config.write_text(text)
    limits = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2"]
    main(["--config", str(config), *flags, *limits, "--trainer.default_root_dir", str(tmp_path)])
    path = str(tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt")
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        evaluate(["--ckpt_path", path, "--report"])
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert len(shown.err.splitlines()) == 2
    assert what in shown.err
    assert not list(tmp_path.rglob("report.csv"))


def test_a_folder_that_cannot_be_is_refused_before_the_test(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit) as caught:
            evaluate(
                ["--ckpt_path", str(run[0] / "checkpoints" / "best.ckpt"), "--report", str(folder)]
            )
        assert caught.value.code == 2
        shown = capsys.readouterr()
        assert str(folder) in shown.err
        assert "test/acc" not in shown.out
