"""The folder of a run, `ROOT/NAME/version_N`, and what is written into it beside the event files."""

import datetime
import importlib.metadata
import json
import math
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from project.errors import UserError, write_whole

LOGS = Path(__file__).parents[1] / "logs"


class Run:
    """One run's folder, held against other processes until `close`.

    folder: ROOT/NAME/version_N. A new one is made where none is given, with the next free N.
    """

    def __init__(self, root: Path, name: str, folder: Path | None = None) -> None:
        self.root = root
        self.is_new = folder is None
        try:
            self.folder = folder or _make_version(root / name)
            self.lock = FileLock(self.folder / ".lock", blocking=False)
            self.lock.acquire()
        except Timeout as error:
            raise UserError(f"{folder} is in use: another process trains there; wait for it or stop it") from error
        except OSError as error:
            raise UserError(
                f"trainer.default_root_dir {root} cannot be written: {error.strerror}: {error.filename}\n"
                "give another folder"
            ) from error

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def close(self) -> None:
        self.lock.release()
        (self.folder / ".lock").unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove a folder in which nothing has happened, and those above it that are empty then, up to ROOT."""
        self.close()
        shutil.rmtree(self.folder)
        for parent in self.folder.parents:
            if parent == self.root or any(parent.iterdir()):
                break
            parent.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a small file whole or not at all."""
        write_whole(self.folder / name, text)

    def write_metrics(self, values: dict[str, Any]) -> None:
        self.write("metrics.json", json_text(values, indent=2) + "\n")


def json_text(values: dict[str, Any], indent: int | None = None) -> str:
    """JSON, which has no NaN and no infinity: null in their place."""
    known = {
        key: value if not isinstance(value, float) or math.isfinite(value) else None for key, value in values.items()
    }
    return json.dumps(known, indent=indent, allow_nan=False)


def _make_version(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    versions = [int(path.name.removeprefix("version_")) for path in run_folders(folder)]
    number = max(versions, default=-1) + 1
    while True:
        version = folder / f"version_{number}"
        try:
            version.mkdir()  # fails if another run has just made it
        except FileExistsError:
            number += 1
        else:
            return version


def run_folders(folder: Path) -> list[Path]:
    """The folders version_N below ROOT/NAME, oldest first."""
    found = [path for path in folder.glob("version_*") if re.fullmatch(r"version_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version_")))


def find_checkpoint(ckpt_path: str, root: Path, name: str) -> Path:
    """The file meant by --ckpt_path: a path, or `last` or `best` of the newest run in ROOT/NAME that has one."""
    if ckpt_path not in ("last", "best"):
        return Path(ckpt_path)
    for folder in reversed(run_folders(root / name)):
        path = folder / "checkpoints" / f"{ckpt_path}.ckpt"
        if path.is_file():
            return path
    raise UserError(f"ckpt_path {ckpt_path}: no run in {root / name} has one; leave --ckpt_path out to start a run")


def folder_to_continue(checkpoint: Path, root: Path, name: str) -> Path | None:
    """The run folder below ROOT/NAME whose last.ckpt this is. From any other checkpoint a new run starts."""
    folder = checkpoint.resolve().parents[1]
    goes_on = checkpoint.name == "last.ckpt" and folder in [path.resolve() for path in run_folders(root / name)]
    return folder if goes_on else None


def describe_environment(trainer: Trainer) -> str:
    """Date, command, versions, devices and git commit, a line each."""
    packages = ["torch", "torchvision", "lightning", "torchmetrics", "tensorboard", "jsonargparse", "numpy"]
    lines = [
        f"date: {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}",
        f"command: {' '.join(sys.argv)}",
        f"platform: {platform.platform()}",
        f"python: {platform.python_version()}",
        *(f"{package}: {importlib.metadata.version(package)}" for package in packages),
        f"cuda: {torch.version.cuda}",
        f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        *(f"gpu {i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())),
        f"devices in use: {trainer.num_devices * trainer.num_nodes} x {trainer.strategy.root_device.type}",
        f"git commit: {_git_commit()}",
    ]
    return "\n".join(lines) + "\n\n"


def _git_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--match=-"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"  # no git, or not a repository


class RunRecorder(Callback):
    """Writes down what a run is, when its training starts: its config and environment into its folder, the config into
    its checkpoints, the hyper-parameters into TensorBoard's HPARAMS tab; and its seconds of training, resumed or not.

    config, text: the config, as values and as YAML.
    monitor: a metric that validation must log.
    """

    def __init__(self, config: dict[str, Any], text: str, run: Run | None = None, monitor: str | None = None) -> None:
        self.config = config
        self.text = text
        self.run = run
        self.monitor = monitor
        self.train_seconds = 0.0
        self.start: float | None = None

    def state_dict(self) -> dict[str, float]:
        return {"train_seconds": self.total_seconds()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        if self.start is None:  # not when the test restores the best checkpoint
            self.train_seconds = state_dict["train_seconds"]

    def total_seconds(self) -> float:
        return self.train_seconds + (time.monotonic() - self.start if self.start is not None else 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.monotonic()
        if self.run and trainer.is_global_zero:
            self.run.write("config.yaml", self.text)
            with (self.run.folder / "environment.txt").open("a", encoding="utf-8") as file:
                file.write(describe_environment(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # before the epoch's checkpoint: a run that is killed afterwards goes on with its curves whole
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.flush()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        if self.monitor and self.monitor not in metrics:
            raise UserError(
                f"--monitor {self.monitor!r} is not among the metrics of a validation: {', '.join(metrics)}", 2
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.logger, TensorBoardLogger) and trainer.is_global_zero:
            trainer.logger.log_hyperparams(hyper_parameters(self.config))  # hparams.yaml
            # the tab reads the metrics' values from the curves of the same names
            for summary in hparams(hyper_parameters(self.config), {"val/acc": 0, "test/acc": 0, "test/loss": 0}):
                trainer.logger.experiment.file_writer.add_summary(summary)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.config


def hyper_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """What tells one experiment from another, flat: {"model.lr": 0.01, "model.net": "project.models.mlp.MLP", ...}."""
    plumbing = ("data_dir", "num_workers", "pin_memory", "persistent_workers")  # changes no result
    flat: dict[str, Any] = {"seed": config["seed_everything"]}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                add(key if name in ("class_path", "init_args") else f"{key}.{name}", inner)
        elif value is not None and key.rpartition(".")[2] not in plumbing:
            flat[key] = value if isinstance(value, bool | int | float | str) else str(value)

    add("model", config["model"])
    add("data", config["data"])
    for name in ("max_epochs", "precision", "accumulate_grad_batches", "gradient_clip_val"):
        add(f"trainer.{name}", config["trainer"][name])
    return flat
