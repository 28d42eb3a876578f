"""What a run writes down about itself: config, environment, code, hyperparameters, progress."""

import datetime
import functools
import importlib.metadata
import math
import os
import platform
import shlex
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
from lightbase.curves import num_steps
from lightbase.devices.devices import describe_devices
from lightbase.errors import UserError, first_line
from lightbase.folder import PROJECT, Run, flatten, json_text
from lightbase.resume.checkpoints import RunCheckpoint
from lightbase.run.loggers import RunCSV, RunTensorBoard

CODE = ("lightbase", "configs", "scripts", ":(glob)*.py", "pyproject.toml")
LARGEST = 2**18  # bytes of an untracked file
SECONDS = 2  # for all git commands together, because the training waits for them
PACKAGES = ["torch", "torchvision", "lightning", "torchmetrics", "tensorboard", "jsonargparse"]


class RunRecorder(Callback):
    """Writes config.yaml, code.diff, environment.txt and progress.json into the run's folder, the
    hyperparameters into its loggers, and the config into its checkpoints. Counts the seconds of
    training, across resumes.

    config, text: the config, as values and as YAML. run: None where nothing is written.
    """

    def __init__(self, config: dict[str, Any], text: str, run: Run | None = None) -> None:
        self.config, self.text, self.run = config, text, run
        self.seconds_before = 0.0  # of training, before a resume
        self.start: float | None = None
        # epochs, steps and seconds at the end; with ddp_spawn another process writes them
        self.totals = torch.zeros(3, dtype=torch.float64).share_memory_()

    def state_dict(self) -> dict[str, float]:
        return {"train_seconds": self.train_seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.start is None:  # not when the test loads the best checkpoint
            self.seconds_before = state_dict["train_seconds"]

    def train_seconds(self) -> float:
        if self.start is None:
            return self.seconds_before
        return self.seconds_before + time.monotonic() - self.start

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.run:  # Lightning would keep the file of an earlier start
            (self.run.folder / "hparams.yaml").unlink(missing_ok=True)
        parameters = hyper_parameters(self.config)
        for logger in trainer.loggers:
            if isinstance(logger, RunTensorBoard | RunCSV):
                logger.drop_later_points()
            logger.log_hyperparams(parameters)
            if isinstance(logger, TensorBoardLogger):
                # The first summary lists columns. Without it TensorBoard chooses them: first the
                # settings in which runs differ.
                for summary in hparams(parameters, {})[1:]:
                    logger.experiment.file_writer.add_summary(summary)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.monotonic()
        if self.run and trainer.is_global_zero:
            self.write_files(self.run, trainer)
        self.write_progress(trainer)

    def write_files(self, run: Run, trainer: Trainer) -> None:
        run.keep("config.yaml")
        run.write("config.yaml", self.text)
        _, patch = source()
        if patch:
            run.keep("code.diff")
            run.write("code.diff", patch)
        run.keep("metrics.json")
        (run.folder / "metrics.json").unlink(missing_ok=True)  # it marks a run that has finished
        with (run.folder / "environment.txt").open("a", encoding="utf-8") as file:
            file.write(describe_environment(trainer))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write_progress(trainer)  # here, because best.ckpt of the last epoch is written now

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        best, metrics = best_callback(trainer), trainer.callback_metrics
        if best and best.monitor and best.monitor not in metrics and not best.or_last:
            names = ", ".join(metrics) or "it logs none"
            what = f"is not among the metrics of a validation: {names}"
            raise UserError(f"--monitor {best.monitor!r} {what}", 2)
        if not trainer.sanity_checking:
            self.write_progress(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # before the epoch's checkpoint: a run that is killed after it has all points up to it
        for logger in trainer.loggers:
            logger.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write_progress(trainer)

    def write_progress(self, trainer: Any) -> None:
        """Write progress.json, with the best value so far if epochs are compared."""
        if not self.run or not trainer.is_global_zero:
            return
        values = {
            "epochs": trainer.fit_loop.epoch_progress.current.processed,
            "steps": num_steps(trainer),
            "train_seconds": round(self.train_seconds(), 3),
        }
        best = best_callback(trainer)
        score = best.best_model_score if best and best.monitor else None
        if best and score is not None and score.isfinite():
            values |= {"monitor": best.monitor, "mode": best.mode, "best": float(score)}
        self.run.write("progress.json", json_text(values, indent=2) + "\n")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        epochs: float = trainer.fit_loop.epoch_progress.current.ready
        num_batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if 0 < num_batches < trainer.num_training_batches < math.inf:  # max_steps ended the epoch
            epochs -= 1 - num_batches / trainer.num_training_batches
        totals = (epochs, num_steps(trainer), self.train_seconds())
        self.totals.copy_(torch.tensor(totals, dtype=torch.float64))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.config
        checkpoint["package"] = PROJECT.package
        checkpoint["lightbase"] = lightbase.__version__

    def metrics(self) -> dict[str, float]:
        """Return epochs, steps and seconds of the training that has ended."""
        epochs, steps, seconds = self.totals.tolist()
        return {
            "epochs": int(epochs) if epochs.is_integer() else round(epochs, 2),
            "steps": int(steps),
            "train_seconds": round(seconds, 3),
        }


def best_callback(trainer: Trainer) -> RunCheckpoint | None:
    """Return the callback that writes best.ckpt and knows the best value so far; None with
    --trainer.enable_checkpointing false."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, RunCheckpoint) and callback.filename == "best":
            return callback
    return None


def hyper_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return what tells one experiment from another, by the names of flags and as plain values:
    {"model.lr": 0.01, "model.net": "my.models.mlp.MLP", ...}."""
    names = ("max_epochs", "precision", "accumulate_grad_batches", "gradient_clip_val")
    trainer = {name: config["trainer"][name] for name in names}
    parts = {"model": config["model"], "data": config["data"], "trainer": trainer}
    parameters = {"seed": config["seed_everything"]}
    for key, value in flatten(parts).items():
        if value is None or key.rpartition(".")[2] in LOOKS_ON:
            continue
        is_plain = isinstance(value, bool | int | float | str)
        parameters[key] = value if is_plain else str(value)
    return parameters


def describe_environment(trainer: Trainer) -> str:
    """Return date, command, versions, devices and git commit, a line each."""
    commit, patch = source()
    # a training on the CPU must not start CUDA, whose driver may not work
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    lines = [
        f"date: {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}",
        f"command: {shlex.join(['python', *sys.argv])}",
        f"platform: {platform.platform()}",
        f"python: {platform.python_version()}",
        *(f"{name}: {importlib.metadata.version(name)}" for name in (*PACKAGES, "numpy")),
        f"cuda: {torch.version.cuda}",
        f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        *(f"gpu {i}: {torch.cuda.get_device_name(i)}" for i in range(num_gpus)),
        f"processes: {trainer.world_size}, machines: {trainer.num_nodes}",
        describe_devices(trainer),
        f"git commit: {commit}" + (", with the changes in code.diff" if patch else ""),
    ]
    return "\n".join(lines) + "\n\n"


@functools.cache  # a process keeps the code that it has imported
def source(root: Path | None = None) -> tuple[str, str]:
    """Return the commit, and a patch from the commit to the present code, with untracked files:
    `git apply` of the patch in a checkout of the commit gives the code of the run.

    If git fails or takes too long, the first text says why the code was not recorded.
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
        what = f"untracked and over {LARGEST:,} bytes, not here"
        return commit, "".join(f"{what}: {file}\n" for file in large) + patch
    return (
        f"{commit}, changes not recorded ({reason})" if commit else f"not recorded ({reason})",
        "",
    )


def run_git(root: Path, index: Path, end: float, *args: str) -> str:
    """Return what a git command prints. Raises OSError if the command fails, and TimeoutExpired if
    it still runs at `end`, a time of time.monotonic; then it is killed."""
    result = subprocess.run(
        ["git", "-C", str(root), "-c", "core.quotepath=off", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | {"GIT_INDEX_FILE": str(index)},
        text=True,
        errors="replace",
        timeout=end - time.monotonic(),
        start_new_session=True,  # a terminal's Ctrl-C is for the run alone
    )
    if result.returncode:
        reason = result.stderr.strip() or f"status {result.returncode}"
        raise ChildProcessError(f"git {args[0]}: {reason}")
    return result.stdout
