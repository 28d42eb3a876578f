"""Test a checkpoint again, on the data and with the settings of its run.

The metrics are printed as a table, and as JSON in the last line. Files are written only
with --report: see ClassReport.
"""

from pathlib import Path
from typing import Any

from lightning import Callback

from lightbase.commands import arguments
from lightbase.commands.checkpoint import open_checkpoint, trainer_of
from lightbase.commands.script import short_errors
from lightbase.core.callbacks import StopOnSignal, leave
from lightbase.core.curves import is_of_class
from lightbase.core.devices import describe_devices
from lightbase.core.errors import UserError, say
from lightbase.core.files import json_text
from lightbase.core.tables import as_table
from lightbase.core.testing import NO_TEST, run_test
from lightbase.extras.report import ClassReport


def main(args: arguments.Args = None) -> dict[str, Any]:
    """Test the checkpoint, and print the metrics as a table and as JSON.

    args: The arguments of the script.
    Return the metrics by name, such as test/acc.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    with short_errors():
        options, flags = arguments.evaluate().read(args)
        spec, model, data = open_checkpoint(options, flags)
        callbacks: list[Callback] = [StopOnSignal()]
        report = None
        if options.report is not None:
            report = ClassReport(report_folder(options.report, options.ckpt_path))
            callbacks.append(report)
        with trainer_of(spec, model, callbacks) as trainer:
            say(describe_devices(trainer))
            metrics = run_test(trainer, model, data, None)
        leave(trainer)
        if not metrics:
            raise UserError(NO_TEST)
    names = sorted(metrics, key=is_of_class)
    lines = as_table([("metric", "value"), *[(name, metrics[name]) for name in names]])
    if report is not None:
        lines += report.lines
    say("\n".join([*lines, json_text(metrics)]))
    return metrics


def report_folder(typed: str, checkpoint: Path) -> Path:
    """Return the folder for --report, which is made if it is missing.

    typed: The value of the flag. If it is empty, the report goes to the run's folder,
        or beside a checkpoint that lies in no run.
    checkpoint: The path of the checkpoint.
    """
    folder = checkpoint.absolute().parent
    if folder.name == "checkpoints":
        folder = folder.parent
    if typed:
        folder = Path(typed)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
