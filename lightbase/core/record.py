"""What a run writes down about itself: config, environment, progress, and the curves
and hyperparameters in its loggers."""

import datetime
import functools
import importlib.metadata
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import (
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard.summary import hparams

import lightbase
from lightbase.core.checkpoint import RunCheckpoint
from lightbase.core.compat import logged_step_of
from lightbase.core.config import LOOKS_ON, configs_of_loggers
from lightbase.core.curves import num_steps
from lightbase.core.devices import describe_devices
from lightbase.core.errors import UserError, first_line
from lightbase.core.folder import PROJECT, Run, flatten, json_text
from lightbase.core.training_cli import TrainingCLI

PACKAGES = [
    "torch",
    "torchvision",
    "lightning",
    "torchmetrics",
    "tensorboard",
    "jsonargparse",
]


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard's logger, with tags for which it opens the curves of train/ and val/
    first."""

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None
    ) -> None:
        tags = {}
        for name in metrics:  # TensorBoard sorts by name: train/ and val/ come first
            tag = re.sub(r"^(epoch$|lr\b)", r"watch/\1", name)
            tags[re.sub(r"^test(?=[/_])", "view/test", tag)] = metrics[name]
        tags.pop("view/test/num_samples", None)
        super().log_metrics(tags, step)


class RunRecorder(Callback):
    """Writes config.yaml, environment.txt and progress.json into the run's folder, the
    hyperparameters into its loggers, and the config into its checkpoints. Counts the
    seconds of training, across resumes.

    config, text: the config, as values and as YAML. run: None where nothing is written.
    """

    def __init__(
        self, config: dict[str, Any], text: str, run: Run | None = None
    ) -> None:
        self.config, self.text, self.run = config, text, run
        self.seconds_before = 0.0  # of training, before a resume
        self.start: float | None = None
        self.first_step = 0  # of this start in the run's folder
        # epochs, steps and seconds at the end; with ddp_spawn another process writes
        # them
        self.totals = torch.zeros(3, dtype=torch.float64).share_memory_()

    def state_dict(self) -> dict[str, float]:
        return {"train_seconds": self.train_seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds_before = state_dict["train_seconds"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.run and not self.run.is_new:
            # not its global_step, which counts each of several optimizers
            self.first_step = logged_step_of(checkpoint)

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
            logger.log_hyperparams(parameters)
            if self.run and isinstance(logger, TensorBoardLogger):
                writer = logger.experiment.file_writer
                # TensorBoard drops the points from this step on that are there now. It
                # ignores the first such event of a run, so a new run needs one, too.
                restart = SessionLog(status=SessionLog.START)
                writer.add_event(Event(step=self.first_step, session_log=restart))
                # Its first summary would list columns. TensorBoard takes those that
                # differ first.
                for summary in hparams(parameters, {})[1:]:
                    writer.add_summary(summary)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.monotonic()
        if self.run and trainer.is_global_zero:
            self.run.write("config.yaml", self.text)
            folder = self.run.folder
            (folder / "metrics.json").unlink(
                missing_ok=True
            )  # it marks a run that has finished
            with (folder / "environment.txt").open("a", encoding="utf-8") as file:
                file.write(describe_environment(trainer))  # each start adds to it
        self.write_progress(trainer)

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        self.write_progress(
            trainer
        )  # here, because best.ckpt of the last epoch is written now

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        best, metrics = best_callback(trainer), trainer.callback_metrics
        if trainer.sanity_checking and len(trainer.num_sanity_val_batches) > 1:
            return  # Lightning keeps no values of several loaders here
        if best and best.monitor and best.monitor not in metrics:
            names = ", ".join(metrics) or "it logs none"
            what = f"is not among the metrics of a validation: {names}"
            raise UserError(f"--monitor {best.monitor!r} {what}", status=2)
        if not trainer.sanity_checking:
            self.write_progress(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # before the epoch's checkpoint: a run that is killed after it has all points up
        # to it
        for logger in trainer.loggers:
            logger.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds_before, self.start = self.train_seconds(), None
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
        if (
            0 < num_batches < trainer.num_training_batches < math.inf
        ):  # max_steps ended the epoch
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
    """Return the callback that writes best.ckpt and knows the best value so far; None
    with --trainer.enable_checkpointing false."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, RunCheckpoint) and callback.filename == "best":
            return callback
    return None


def hyper_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return what tells one experiment from another, by the names of flags and as plain
    values: {"model.lr": 0.01, "model.net": "my.models.mlp.MLP", ...}."""
    names = ("max_epochs", "precision", "accumulate_grad_batches", "gradient_clip_val")
    trainer = {name: config["trainer"][name] for name in names}
    parts = {"model": config["model"], "data": config["data"], "trainer": trainer}
    parameters = {"seed": config["seed_everything"]}
    for key, value in flatten(parts).items():
        if value is None or key.rpartition(".")[2] in LOOKS_ON:
            continue
        name = re.sub(
            r"[^\w/. -]", "_", key
        )  # MLflow refuses model.parameter_groups.*.bias.lr
        is_plain = isinstance(value, bool | int | float | str)
        parameters[name] = value if is_plain else str(value)
    return parameters


def describe_environment(trainer: Trainer) -> str:
    """Return date, command, versions, devices and git commit, a line each."""
    # a training on the CPU must not start CUDA, whose driver may not work
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    lines = [
        f"date: {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}",
        f"command: {shlex.join(['python', *sys.argv])}",
        f"platform: {platform.platform()}",
        f"python: {platform.python_version()}",
        *(
            f"{name}: {importlib.metadata.version(name)}"
            for name in (*PACKAGES, "numpy")
        ),
        f"cuda: {torch.version.cuda}",
        f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        *(f"gpu {i}: {torch.cuda.get_device_name(i)}" for i in range(num_gpus)),
        f"processes: {trainer.world_size}, machines: {trainer.num_nodes}",
        describe_devices(trainer),
        f"git commit: {git_commit()}",
    ]
    return "\n".join(lines) + "\n\n"


@functools.cache  # a process keeps the code that it has imported
def git_commit() -> str:
    """Return the commit of the user's repository, and whether files have changed since;
    if git fails or takes too long, why."""
    command = ["git", "--no-optional-locks", "-C", str(PROJECT.root), "status"]
    try:
        result = subprocess.run(
            [*command, "--porcelain=v2", "--branch"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2,  # the training waits for it
            start_new_session=True,  # a terminal's Ctrl-C is for the run alone
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not recorded ({first_line(error)})"
    if result.returncode:
        return f"not recorded (git ended with {result.returncode}: {result.stderr.strip()})"
    lines = result.stdout.splitlines()
    commit = lines[0].removeprefix("# branch.oid ")
    has_changes = any(not line.startswith("#") for line in lines)
    return f"{commit}, with uncommitted changes" if has_changes else commit


DEFAULT = Namespace(
    class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=Namespace()
)


def make_loggers(
    cli: TrainingCLI, root: Path, run: Run | None
) -> list[Logger] | Literal[False]:
    """Build the loggers of trainer.logger; TensorBoard's without one.

    run: None in a fast_dev_run, and in all processes but the first. Raises UserError if
    a logger cannot start, for instance without its package or its server.
    """
    if cli.config.trainer.logger in (False, []):
        return False
    if run is None:
        return [RunTensorBoard(root, version="")]  # writes nothing
    if logger := cli.config_init.trainer.logger:  # an object, see lightbase.train
        return logger if isinstance(logger, list) else [logger]
    configs = configs_of_loggers(cli.config.trainer.logger) or [DEFAULT]
    return [make_logger(cli, config, run) for config in configs]


def make_logger(cli: TrainingCLI, config: Any, run: Run) -> Logger:
    """Build a logger. Its arguments that the config leaves out follow from the run."""
    name = config.class_path.rpartition(".")[2]
    arguments = default_arguments(str(cli.config.name), run).get(name, {})
    for given in (config.get("init_args"), config.get("dict_kwargs")):
        values = vars(given or Namespace())
        arguments |= {key: value for key, value in values.items() if value is not None}
    # MLflow 3 needs it where the runs are in a folder
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        if config.class_path == DEFAULT.class_path:
            return RunTensorBoard(**arguments)
        config = Namespace(class_path=config.class_path, init_args=Namespace(arguments))
        logger: Logger = cli.instantiate(
            Namespace(trainer=Namespace(logger=config))
        ).trainer.logger
        if isinstance(logger, WandbLogger | MLFlowLogger):
            _ = logger.experiment  # starts the run at the server
        return logger
    except Exception as error:  # each package has errors of its own
        raise UserError(f"{name} cannot start: {first_line(error)}") from error


def default_arguments(title: str, run: Run) -> dict[str, dict[str, Any]]:
    """Return the arguments by the logger's class. title: the run's name, without its
    version."""
    version = run.folder.name
    number = version.removeprefix("version_")
    return {
        "TensorBoardLogger": {
            "save_dir": run.folder.parents[1],
            "name": run.folder.parent.name,
            # Lightning's bars show a number, but the last four letters of a text
            "version": int(number) if number.isdecimal() else version,
            "default_hp_metric": False,
        },
        # Lightning's writer deletes an earlier metrics.csv: it counts versions of its
        # folder
        "CSVLogger": {"save_dir": str(run.folder), "name": "csv"},
        "WandbLogger": {
            "save_dir": str(run.folder),
            "name": f"{title}/{version}",
            "project": os.environ.get("WANDB_PROJECT", PROJECT.package),
        },
        "MLFlowLogger": {
            "save_dir": str(run.root / "mlruns"),
            "experiment_name": title,
            "run_name": version,
        },
    }


@contextmanager
def ended(loggers: list[Logger] | Literal[False]) -> Iterator[None]:
    """End the run at W&B when ours ends: the next run of this process would continue
    it."""
    status = 1
    try:
        yield
        status = 0
    finally:
        for logger in loggers or []:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish(status)
