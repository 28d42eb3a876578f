"""Which code a run had: the commit, and what is not in it."""

import contextlib
import datetime
import functools
import importlib.metadata
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

import lightbase
from lightbase.cli.config import LOOKS_ON
from lightbase.devices.devices import describe_devices
from lightbase.errors import UserError, first_line
from lightbase.folder import PROJECT, Run, flatten, json_text
from lightbase.run.selection import Selection

CODE = ("lightbase", "configs", "scripts", ":(glob)*.py", "pyproject.toml")
LARGEST = 2**18  # bytes of an untracked file
SECONDS = 2  # for all git commands together, because the training waits for them


@functools.cache  # what a process has imported stays
def source(root: Path | None = None) -> tuple[str, str]:
    """The commit, and a patch from it to the code of today, untracked files included: `git apply`
    of the patch in a checkout of the commit gives the code of the run.

    Where git fails, the first text says what was not recorded and why.
    """
    root, code = root or PROJECT.root, (PROJECT.package, *CODE)
    commit, end = "", time.monotonic() + SECONDS
    try:
        # a new index: the user's index does not change, and may be damaged
        with tempfile.TemporaryDirectory() as folder:
            git = functools.partial(run_git, root, Path(folder, "index"), end)
            commit = git("rev-parse", "HEAD").strip()
            if not commit:
                raise ChildProcessError("git rev-parse: printed nothing")
            git("read-tree", "HEAD")
            untracked = git("ls-files", "-zo", "--exclude-standard", "--", *code).split("\0")[:-1]
            large = [file for file in untracked if (root / file).lstat().st_size > LARGEST]
            git("add", "--intent-to-add", "--", *(file for file in untracked if file not in large))
            patch = git("diff", "HEAD", "--", *code)
    except subprocess.TimeoutExpired:
        reason = f"git takes longer than {SECONDS} s"
    except OSError as error:
        reason = first_line(error)
    else:
        why = f"untracked and over {LARGEST:,} bytes"
        return commit, "".join(f"{why}, not here: {file}\n" for file in large) + patch
    return f"{commit}{', changes ' * bool(commit)}not recorded ({reason})", ""


def run_git(root: Path, index: Path, end: float, *args: str) -> str:
    """Return what a git command prints. Raises OSError if the command fails, and TimeoutExpired if
    it still runs at `end`, a time of time.monotonic; the command is ended then."""
    with subprocess.Popen(
        ["git", "-C", str(root), "-c", "core.quotepath=off", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"GIT_INDEX_FILE": str(index)},
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C is for the run alone
    ) as process:
        try:
            output, message = process.communicate(timeout=end - time.monotonic())
        except BaseException:
            if sys.platform == "win32":
                process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)  # with its children
            raise
    if process.returncode:
        reason = message.strip() or f"status {process.returncode}"
        raise ChildProcessError(f"git {args[0]}: {reason}")
    return output


class RunRecorder(Callback):
    """Writes a run's config and environment into its folder when training starts, the config into
    its checkpoints, the hyper-parameters into its loggers, progress.json as it gets on; keeps its
    seconds of training and the best value of the monitored metric, across resumes.

    config, text: the config, as values and as YAML.
    """

    def __init__(
        self,
        config: dict[str, Any],
        text: str,
        run: Run | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.config, self.text, self.run, self.selection = config, text, run, selection
        self.seconds_before = 0.0  # a resume
        self.best: float | None = None
        self.start: float | None = None
        self.result = torch.zeros(
            3, dtype=torch.float64
        ).share_memory_()  # with ddp_spawn other processes train
        """Epochs, steps and seconds at the end."""

    def state_dict(self) -> dict[str, float | None]:
        return {"train_seconds": self.train_seconds(), "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.start is None:  # not when the test restores the best checkpoint
            self.seconds_before = state_dict["train_seconds"]
            self.best = state_dict["best"] if self.run and not self.run.is_new else None

    def train_seconds(self) -> float:
        return self.seconds_before + (
            time.monotonic() - self.start if self.start is not None else 0
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.monotonic()
        if self.run and trainer.is_global_zero:
            self.run.keep("config.yaml")
            self.run.write("config.yaml", self.text)
            if patch := source()[1]:
                self.run.keep("code.diff")
                self.run.write("code.diff", patch)
            self.run.keep("metrics.json")
            (self.run.folder / "metrics.json").unlink(
                missing_ok=True
            )  # the run is not finished any more
            with (self.run.folder / "environment.txt").open("a", encoding="utf-8") as file:
                file.write(describe_environment(trainer))
            self.write_progress(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # before the epoch's checkpoint: a run that is killed afterwards goes on with its curves
        # whole
        for logger in trainer.loggers:
            logger.save()
        self.write_progress(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        known = trainer.callback_metrics
        monitor, mode, or_last = self.selection or (None, "min", True)
        if monitor not in known and not or_last:
            reason = (
                f"is not among the metrics of a validation: {', '.join(known) or 'it logs none'}"
            )
            raise UserError(f"--monitor {monitor!r} {reason}", 2)
        if monitor in known and not trainer.sanity_checking:
            value = float(known[monitor])
            if not math.isnan(value):
                self.best = (max if mode == "max" else min)(
                    value, value if self.best is None else self.best
                )
            self.write_progress(trainer)

    def write_progress(self, trainer: Any) -> None:
        if self.run and trainer.is_global_zero:
            done = {
                "epochs": trainer.fit_loop.epoch_progress.current.processed,
                "steps": trainer.global_step,
            }
            values = {**done, "train_seconds": round(self.train_seconds(), 3)}
            if self.selection and self.best is not None:
                values |= {
                    "monitor": self.selection.monitor,
                    "mode": self.selection.mode,
                    "best": self.best,
                }
            self.run.write("progress.json", json_text(values, indent=2) + "\n")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = hyper_parameters(self.config)
        if self.run and trainer.is_global_zero:  # of an earlier start, which Lightning would keep
            (self.run.folder / "hparams.yaml").unlink(missing_ok=True)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.log_hyperparams(parameters)
            if isinstance(logger, TensorBoardLogger):
                # without the first, a list of columns, TensorBoard finds them itself: first those
                # in which runs differ
                for summary in hparams(parameters, {})[1:]:
                    logger.experiment.file_writer.add_summary(summary)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            num, batches = (
                trainer.fit_loop.epoch_loop.batch_progress.current.ready,
                trainer.num_training_batches,
            )
            missing = (
                1 - num / batches if 0 < num < batches < math.inf else 0
            )  # where max_steps has ended an epoch
            done = (
                trainer.fit_loop.epoch_progress.current.ready - missing,
                trainer.global_step,
                self.train_seconds(),
            )
            self.result.copy_(torch.tensor(done, dtype=torch.float64))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.config
        checkpoint["package"] = PROJECT.package
        checkpoint["lightbase"] = lightbase.__version__


def hyper_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """What tells one experiment from another, flat: {"model.lr": 0.01, "model.net":
    "my.models.mlp.MLP", ...}."""
    flags = ("max_epochs", "precision", "accumulate_grad_batches", "gradient_clip_val")
    trainer = {flag: config["trainer"][flag] for flag in flags}
    flat = {"seed": config["seed_everything"]}
    for key, value in flatten(
        {"model": config["model"], "data": config["data"], "trainer": trainer}
    ).items():
        if value is not None and key.rpartition(".")[2] not in LOOKS_ON:
            flat[key] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def describe_environment(trainer: Trainer) -> str:
    """Date, command, versions, devices and git commit, a line each."""
    packages = [
        "torch",
        "torchvision",
        "lightning",
        "torchmetrics",
        "tensorboard",
        "jsonargparse",
        "numpy",
    ]
    commit, patch = source()
    on_gpu = torch.cuda.is_initialized()  # a training on the CPU needs no driver that works
    lines = [
        f"date: {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}",
        f"command: {shlex.join(['python', *sys.argv])}",
        f"platform: {platform.platform()}",
        f"python: {platform.python_version()}",
        *(f"{package}: {importlib.metadata.version(package)}" for package in packages),
        f"cuda: {torch.version.cuda}",
        f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        *(
            f"gpu {i}: {torch.cuda.get_device_name(i)}"
            for i in range(torch.cuda.device_count() if on_gpu else 0)
        ),
        f"processes: {trainer.world_size}, machines: {trainer.num_nodes}",
        describe_devices(trainer),
        f"git commit: {commit}{', with the changes in code.diff' * bool(patch)}",
    ]
    return "\n".join(lines) + "\n\n"
