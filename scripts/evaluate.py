"""Test a checkpoint again, on the data and with the settings of its run.

python scripts/evaluate.py --ckpt_path logs/mnist_mlp/version_0/checkpoints/best.ckpt
python scripts/evaluate.py --ckpt_path ... --trainer.accelerator cpu --data.batch_size 1000
python scripts/evaluate.py --ckpt_path ... --data.num_folds null
python scripts/evaluate.py --ckpt_path ... --model.test_views project.data.transforms.mirrored
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

from project.engine.script import ScriptParser, short_errors, starting

with starting():
    from class_report import ClassReport
    from lightning import Callback

    from project.base.datamodule import TensorDataModule
    from project.base.download import prepare_data
    from project.base.errors import UserError
    from project.base.rank import rank, say
    from project.engine.checks import has_test, try_network
    from project.engine.devices import cpu_threads, describe_devices
    from project.engine.folder import json_text, short
    from project.engine.processes import StopOnSignal, end_with_parent, leave, short_process_errors
    from project.engine.quiet import quiet_lightning
    from project.engine.resume import load_run
    from project.engine.run import as_metrics

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
        if "--data.num_folds null" in " ".join(flags).replace("=", " "):
            flags += ["--data.fold", "null"]  # of none
        end_with_parent()
        quiet_lightning()
        run = load_run(known.ckpt_path, flags, known.trust_checkpoint == "true")
        callbacks: list[Callback] = [StopOnSignal()]
        if known.report is not None:
            callbacks.append(ClassReport(report_folder(known.report, known.ckpt_path)))
        trainer = run.make_trainer(logger=False, enable_checkpointing=False, callbacks=callbacks)
        say(describe_devices(trainer))
        if rank() == 0 and isinstance(run.datamodule, TensorDataModule):
            prepare_data(run.datamodule)
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


if __name__ == "__main__":
    main()
