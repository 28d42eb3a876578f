"""What evaluate.py reports of each class: precision, recall, F1, support, and the confusion
matrix."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from rows import as_csv, as_table
from torch import Tensor
from torchmetrics.functional import classification

from project.base.callback import gather
from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.callbacks.prediction_figures import are_logits, class_names
from project.engine.folder import short
from project.engine.script import write_whole

MEASURES = {
    "precision": classification.multiclass_precision,
    "recall": classification.multiclass_recall,
    "f1": classification.multiclass_f1_score,
}


class ClassReport(Callback):
    """Writes report.csv and confusion_matrix.csv into `folder` at the end of a test, of the samples
    of all processes, and prints the first as a table. It wants the logits (N, classes) as output of
    test_step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[tuple[Tensor, Tensor]] = []  # true and predicted class, each (N,)
        self.num_classes = 0

    def on_test_batch_end(  # type: ignore[override]
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        targets: Any = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
        if not are_logits(outputs, targets) or outputs.shape[1] < 2:
            what = (
                f"test_step of {type(pl_module).__name__} returns {describe(outputs)} for "
                f"{describe(targets)}"
            )
            raise UserError(
                f"--report is of classes: {what}\nit needs logits (N, classes) for labels (N,)", 2
            )
        if dataloader_idx:
            raise UserError(
                f"--report is of one test set; {type(trainer.datamodule).__name__} has several", 2
            )
        self.num_classes = outputs.shape[1]
        self.batches.append((targets, outputs.argmax(1)))

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        own = [torch.cat(column).cpu() for column in zip(*self.batches, strict=True)]
        parts = [
            part for part in gather([self.num_classes, *own]) if part[0]
        ]  # a process may have no batch
        if not parts or not trainer.is_global_zero:
            return
        num = parts[0][0]
        true, predicted = (
            torch.cat([part[1] for part in parts]),
            torch.cat([part[2] for part in parts]),
        )
        if not 0 <= int(true.min()) <= int(true.max()) < num:
            raise UserError(
                f"--report: logits of {num} classes, but labels of {true.min()} to {true.max()}"
            )
        data = trainer.datamodule
        names = class_names(data.classes if isinstance(data, TensorDataModule) else [], num)
        self.write(names, true, predicted)

    def write(self, names: list[str], true: Tensor, predicted: Tensor) -> None:
        """true, predicted: (N,)"""
        num = len(names)
        counts = classification.multiclass_confusion_matrix(
            predicted, true, num
        )  # (true, predicted)
        values = [
            measure(predicted, true, num, average=None).tolist() for measure in MEASURES.values()
        ]
        means = [
            f"{name} {measure(predicted, true, num, average='macro'):.4f}"
            for name, measure in MEASURES.items()
        ]
        rows = [
            ("class", *MEASURES, "support"),
            *zip(names, *values, counts.sum(1).tolist(), strict=True),
        ]
        pairs = zip(names, counts.tolist(), strict=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "report.csv", as_csv(rows))
        matrix = [("true / predicted", *names), *((name, *row) for name, row in pairs)]
        write_whole(self.folder / "confusion_matrix.csv", as_csv(matrix))
        shown = [
            tuple(f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row)
            for row in rows
        ]
        print("\n".join(as_table(shown)))
        accuracy = f"Accuracy {(true == predicted).double().mean():.4f} of {len(true)} samples"
        print(f"{accuracy}; means over the classes: {', '.join(means)}")
        print(f"Report: {short(self.folder / 'report.csv')} and confusion_matrix.csv", flush=True)


def describe(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return (
        f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if is_tensor
        else type(value).__name__
    )
