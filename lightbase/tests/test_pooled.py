"""A cross-validation ends with the range of its folds and the metrics of all samples
together."""

import pytest
import torch
from paths import TINY, argv, script
from torchmetrics.functional.classification import multiclass_f1_score

from lightbase.setup.load import load_run

F1 = "--model.metrics.f1 torchmetrics.classification.MulticlassF1Score"
FOLDS = "--data.num_folds 3 --search data.fold=0,1,2 --name folds"


def test_metrics_of_all_folds_come_from_the_predictions_of_all(tmp_path, capsys):
    root = ["--trainer.default_root_dir", str(tmp_path)]
    short = f"--config {TINY} --trainer.max_epochs 1 --data.num_train 100"
    flags = argv(short, F1, "--model.metrics.f1.average macro", FOLDS)
    script("sweep").main([*root, *flags])
    head, *rows = capsys.readouterr().out.splitlines()[-5:]
    assert head == "pooled: 100 samples, each tested by the network of its fold"
    table = {row.rsplit(maxsplit=5)[0]: row.split()[-5:] for row in rows[1:]}
    outputs, targets = [], []
    for path in sorted(tmp_path.rglob("best.ckpt")):
        _, model, data = load_run(path, root)
        data.setup("test")
        inputs, labels = data.splits["test"].values
        with torch.no_grad():
            outputs.append(model.eval()(data.normalize(inputs)))
        targets.append(labels)
    predicted, true = torch.cat(outputs), torch.cat(targets)
    scores = [
        multiclass_f1_score(*pair, 4).item()
        for pair in zip([*outputs, predicted], [*targets, true], strict=True)
    ]
    num, mean, lowest, highest, pooled = map(float, table["test/f1"])
    assert num == 3
    assert mean == pytest.approx(sum(scores[:3]) / 3, abs=1e-4)
    assert lowest == pytest.approx(min(scores[:3]), abs=1e-4)
    assert highest == pytest.approx(max(scores[:3]), abs=1e-4)
    assert pooled == pytest.approx(scores[3], abs=1e-4)
