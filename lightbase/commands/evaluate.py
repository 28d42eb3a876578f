"""Test a checkpoint again, on the data and with the settings of its run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback

from lightbase.commands import arguments
from lightbase.commands.runs import as_csv, as_table, as_text
from lightbase.commands.script import short_errors
from lightbase.core.callbacks import StopOnSignal, end_with_parent, leave
from lightbase.core.checks import try_network
from lightbase.core.compat import quiet_lightning
from lightbase.core.curves import is_of_class
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import cpu_threads, describe_devices, short_device_errors
from lightbase.core.errors import UserError, rank, say
from lightbase.core.folder import json_text, short, write_whole
from lightbase.core.module import BaseModule
from lightbase.core.resume import load_run
from lightbase.core.run import run_test
from lightbase.extras.figures import PredictionKeeper

TASKS = ("multiclass", "multilabel", "segmentation")


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    with short_errors():
        options, flags = arguments.evaluate().read(args)
        end_with_parent()
        quiet_lightning()
        run = load_run(options.ckpt_path, flags, options.trust)
        callbacks: list[Callback] = [StopOnSignal()]
        if options.report is not None:
            place = options.ckpt_path.absolute().parent
            place = place.parent if place.name == "checkpoints" else place
            folder = Path(options.report or place)
            if not folder.is_dir():
                raise UserError(f"--report {folder}: there is no such folder", status=2)
            callbacks.append(report := ClassReport(folder))
        trainer = run.make_trainer(
            logger=False, enable_checkpointing=False, callbacks=callbacks
        )
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
    names = sorted(metrics, key=is_of_class)
    say(
        "\n".join(
            as_table(
                [("metric", "value"), *((x, as_text(metrics[x], x)) for x in names)]
            )
        )
    )
    if options.report is not None:
        say("\n".join(report.lines))
    say(json_text(metrics))
    return metrics


class ClassReport(PredictionKeeper):
    """Writes report.csv, and confusion_matrix.csv of classes or pixels, at the end of a
    test. They cover the samples of all processes, as test_step gives them to `track`.
    lines: A table of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        task = pl_module.task if isinstance(pl_module, BaseModule) else None
        if task not in TASKS or isinstance(trainer.test_dataloaders, list):
            what = (
                f"--report: the attribute task of {type(pl_module).__name__} is {task}"
            )
            raise UserError(
                what, f"it has to be one of {', '.join(TASKS)}, for one test set", 2
            )
        self.start(trainer, pl_module)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self.gather()
        if self.misfit:
            raise UserError(f"--report: {self.misfit}", status=2)
        if trainer.is_global_zero:
            self.write()

    def write(self) -> None:
        scores = self.scores()
        columns = [column.tolist() for column in scores.values()]
        rows = list(zip(self.names, *columns, strict=True))
        header = ("label" if self.task == "multilabel" else "class", *scores)
        write_whole(self.folder / "report.csv", as_csv([header, *rows]))
        if self.task != "multilabel":
            counts = zip(self.names, *self.confusion.T.tolist(), strict=True)
            text = as_csv([("true / predicted", *self.names), *counts])
            write_whole(self.folder / "confusion_matrix.csv", text)
        cells = [
            (name, *(f"{x:.4f}" for x in values), str(n)) for name, *values, n in rows
        ]
        self.lines = [
            *as_table([header, *cells]),
            f"Report: {short(self.folder / 'report.csv')}",
        ]
