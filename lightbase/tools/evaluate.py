"""Test a checkpoint again, on the data and with the settings of its run.

python scripts/evaluate.py --ckpt_path logs/mnist_mlp/version_0/checkpoints/best.ckpt
python scripts/evaluate.py --ckpt_path ... --trainer.accelerator cpu --data.batch_size 1000
python scripts/evaluate.py --ckpt_path ... --data.num_folds null
python scripts/evaluate.py --ckpt_path ... --model.test_views lightbase.data.transforms.mirrored
python scripts/evaluate.py --ckpt_path ... --report

That of a fold is tested on its fold; with --data.num_folds null on the data set's own test set.
--report writes precision, recall, F1 and support of each class to report.csv, and
confusion_matrix.csv, into the run's folder or a given one. The last line on stdout is a JSON object
with test/loss, test/num_samples and the metrics, such as test/acc.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from torch import Tensor
from torchmetrics.functional import classification

from lightbase.cli.command_line import CommandLine
from lightbase.cli.script import ScriptParser, short_errors
from lightbase.compat import quiet_lightning
from lightbase.curves import gather
from lightbase.data.module import BaseDataModule
from lightbase.devices.devices import cpu_threads, describe_devices
from lightbase.devices.processes import StopOnSignal, end_with_parent, leave, short_process_errors
from lightbase.errors import UserError
from lightbase.folder import json_text, short, write_whole
from lightbase.ranks import rank, say
from lightbase.resume.load import load_run
from lightbase.run.checks import has_test, try_network
from lightbase.run.train import as_metrics
from lightbase.tools.tables import as_csv, as_table
from lightbase.watch.figures import are_logits, class_names

FLAGS = ("--data.", "--trainer.", "--model.test_views")


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ScriptParser(description=__doc__)
    parser.add_checkpoint_arguments()
    parser.add_argument(
        "--report", nargs="?", const="", metavar="FOLDER", help="tables of the classes, as CSV too"
    )
    parser.epilog = (
        "--data.* and --trainer.* flags replace those of the run, and so does --model.test_views."
    )
    with short_errors():
        known, flags = parser.parse_known_args(args)
        for flag in flags:
            if flag.startswith("-") and not flag.startswith(FLAGS):
                known_flags = (
                    "--ckpt_path, --trust_checkpoint, --report, --data.*, "
                    "--trainer.* and --model.test_views"
                )
                raise UserError(f"unknown flag {flag}; there are {known_flags}", 2)
        if CommandLine(flags).value("data.num_folds") == "null":
            flags += ["--data.fold", "null"]  # of none
        end_with_parent()
        quiet_lightning()
        run = load_run(known.ckpt_path, flags, known.trust_checkpoint == "true")
        callbacks: list[Callback] = [StopOnSignal()]
        if known.report is not None:
            callbacks.append(ClassReport(report_folder(known.report, known.ckpt_path)))
        trainer = run.make_trainer(logger=False, enable_checkpointing=False, callbacks=callbacks)
        say(describe_devices(trainer))
        if rank() == 0 and isinstance(run.datamodule, BaseDataModule):
            run.datamodule.prepare_data()
            run.datamodule.setup("test")
            if run.config.try_network and "test" in run.datamodule.splits:
                try_network(run.model, run.datamodule, run.config.trainer, "test")
        with short_process_errors(), cpu_threads(run.config.num_threads):
            is_there = has_test(run.model, run.datamodule)
            found = trainer.test(run.model, run.datamodule, verbose=False) if is_there else []
        leave(trainer)
        if not found:
            raise UserError(
                "nothing was tested: trainer.limit_test_batches is 0, or the model or the "
                "data has no test"
            )
    results = as_metrics(found)
    say(json_text(results))
    return results


def report_folder(asked: str, checkpoint: Path) -> Path:
    """That of the checkpoint's run unless asked for another one."""
    own = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    folder = Path(asked) if asked else own
    near = next(path for path in (folder, *folder.parents) if path.exists())
    if not near.is_dir() or not os.access(near, os.W_OK):
        raise UserError(
            f"--report: nothing can be written into {short(folder)}; give another folder", 2
        )
    return folder


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
        names = class_names(data.classes if isinstance(data, BaseDataModule) else [], num)
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
