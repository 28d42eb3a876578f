"""Test a checkpoint again, on the data and with the settings of its run.

python scripts/evaluate.py --ckpt_path logs/mnist_mlp/version_0/checkpoints/best.ckpt
python scripts/evaluate.py --ckpt_path ... --trainer.accelerator cpu --data.batch_size 1000
python scripts/evaluate.py --ckpt_path ... --data.num_folds null
python scripts/evaluate.py --ckpt_path ... --model.test_views lightbase.data.transforms.mirrored
python scripts/evaluate.py --ckpt_path ... --report

A checkpoint of a fold is tested on its fold, with --data.num_folds null on the test set of the
data. --report writes precision, recall, F1 and support of each class to report.csv, and
confusion_matrix.csv, into the folder of the run or another one. The last line on stdout is a JSON
object with test/loss, test/num_samples and the metrics, such as test/acc.
"""

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
from lightbase.devices.devices import cpu_threads, describe_devices, short_device_errors
from lightbase.errors import UserError
from lightbase.folder import json_text, short, write_whole
from lightbase.ranks import rank, say
from lightbase.resume.load import load_run
from lightbase.run.callbacks import StopOnSignal, end_with_parent, leave
from lightbase.run.checks import try_network
from lightbase.run.train import run_test
from lightbase.tools.runs import as_csv, as_table
from lightbase.watch.figures import are_logits, class_names

FLAGS = ("--data.", "--trainer.", "--model.test_views")
MEASURES = {
    "precision": classification.multiclass_precision,
    "recall": classification.multiclass_recall,
    "f1": classification.multiclass_f1_score,
}


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
        options, flags = parser.parse_known_args(args)
        for flag in flags:
            if flag.startswith("-") and not flag.startswith(FLAGS):
                raise UserError(f"unknown flag {flag}\nsee --help", 2)
        if CommandLine(flags).value("data.num_folds") == "null":
            flags += ["--data.fold", "null"]  # of none
        end_with_parent()
        quiet_lightning()
        run = load_run(options.ckpt_path, flags, options.trust_checkpoint == "true")
        callbacks: list[Callback] = [StopOnSignal()]
        if options.report is not None:
            callbacks.append(ClassReport(report_folder(options.report, options.ckpt_path)))
        trainer = run.make_trainer(logger=False, enable_checkpointing=False, callbacks=callbacks)
        say(describe_devices(trainer))
        if rank() == 0 and isinstance(run.datamodule, BaseDataModule):
            run.datamodule.prepare_data()
            run.datamodule.setup("test")
            if run.config.try_network and "test" in run.datamodule.splits:
                try_network(run.model, run.datamodule, run.config.trainer, "test")
        with short_device_errors(), cpu_threads(run.config.num_threads):
            metrics, reason = run_test(trainer, run.model, run.datamodule, None)
        leave(trainer)
        if reason:
            raise UserError(reason)
    say(json_text(metrics))
    return metrics


def report_folder(folder: str, checkpoint: Path) -> Path:
    """The given folder, or else the folder of the checkpoint's run. It is made before the test."""
    in_run = checkpoint.parent.name == "checkpoints"
    path = Path(folder) if folder else checkpoint.parents[1 if in_run else 0]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"--report: {short(path)} cannot be made: {error.strerror}"
        raise UserError(f"{what}; give another folder", 2) from error
    return path


class ClassReport(Callback):
    """Writes report.csv and confusion_matrix.csv at the end of a test, and prints the first.

    It covers the samples of all processes. test_step has to return the logits (N, classes).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_classes = 0
        self.batches: list[tuple[Tensor, Tensor]] = []  # true and predicted class, each (N,)

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
        if not are_logits(outputs, targets) or outputs.shape[1] < 2 or dataloader_idx:
            needs = "--report needs one test set, and a test_step that returns logits (N, classes)"
            step, kind = f"that of {type(pl_module).__name__}", type(outputs).__name__
            raise UserError(f"{needs} for labels (N,)\n{step} returns a {kind}", 2)
        self.num_classes = outputs.shape[1]
        self.batches.append((targets, outputs.argmax(1)))

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        batches = [(true.cpu(), predicted.cpu()) for true, predicted in self.batches]
        batches = [batch for part in gather(batches) for batch in part]
        if not batches or not trainer.is_global_zero:
            return
        true, predicted = (torch.cat(column) for column in zip(*batches, strict=True))
        data = trainer.datamodule
        classes = data.classes if isinstance(data, BaseDataModule) else []
        self.write(class_names(classes, self.num_classes), true, predicted)

    def write(self, names: list[str], true: Tensor, predicted: Tensor) -> None:
        """names: of the classes. true, predicted: class indices (N,)."""
        num = len(names)
        columns, means = [], []
        for name, measure in MEASURES.items():
            columns.append(measure(predicted, true, num, average=None).tolist())
            means.append(f"{name} {measure(predicted, true, num, average='macro'):.4f}")
        matrix = classification.multiclass_confusion_matrix(predicted, true, num)
        support = matrix.sum(1).tolist()  # rows are true classes
        rows = list(zip(names, *columns, support, strict=True))
        header = ("class", *MEASURES, "support")
        counts = [(name, *row) for name, row in zip(names, matrix.tolist(), strict=True)]
        write_whole(self.folder / "report.csv", as_csv([header, *rows]))
        write_whole(
            self.folder / "confusion_matrix.csv", as_csv([("true / predicted", *names), *counts])
        )
        cells = [(name, *(f"{x:.4f}" for x in values), str(n)) for name, *values, n in rows]
        print("\n".join(as_table([header, *cells])))
        accuracy = f"Accuracy {(true == predicted).double().mean():.4f} of {len(true)} samples"
        print(f"{accuracy}; means over the classes: {', '.join(means)}")
        print(f"Report: {short(self.folder / 'report.csv')} and confusion_matrix.csv", flush=True)
