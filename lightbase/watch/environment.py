"""environment.txt in the folder of a run: with what each start of the run trained."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
import time

import torch
from lightning import Callback, LightningModule, Trainer

from lightbase.config.errors import first_line
from lightbase.config.paths import PROJECT
from lightbase.model.curves import run_folder
from lightbase.run.devices import describe_devices, devices_of
from lightbase.run.folder import torchrun_id

PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "torchmetrics",
    "tensorboard",
    "jsonargparse",
    "numpy",
    "scikit-learn",
)
"""Packages whose versions are written into environment.txt."""


class EnvironmentFile(Callback):
    """Adds a part to environment.txt when a training starts."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            file = run_folder(trainer) / "environment.txt"
            with file.open("a", encoding="utf-8") as lines:
                lines.write(describe_environment(trainer))


def describe_environment(trainer: Trainer) -> str:
    """Return the text that each start of a run adds to environment.txt: date, command,
    versions, devices and git commit, a line each. An empty line ends it."""
    instructions = torch.backends.cpu.get_cpu_capability()
    lines = [
        f"date: {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"command: {shlex.join(['python', *sys.argv])}",
        f"platform: {platform.platform()}",
        f"python: {platform.python_version()}",
        f"cuda: {torch.version.cuda}",
        f"cpu: {torch.get_num_threads()} threads, {instructions}",
        f"processes: {trainer.world_size}, machines: {trainer.num_nodes}",
        describe_devices(trainer),
        f"git commit: {git_commit()}",
    ]
    if name := torchrun_id():
        lines.append(f"torchrun: {name}")
    for name in PACKAGES:
        lines.append(f"{name}: {importlib.metadata.version(name)}")
    for device in devices_of(trainer.strategy):
        if device.type == "cuda":
            lines.append(f"{device}: {torch.cuda.get_device_name(device)}")
    return "\n".join(lines) + "\n\n"


def git_commit() -> str:
    """Return the commit of the user's repository, and whether files have changed since
    this commit. If git fails or takes longer than 2 s, return the reason."""
    command = ["git", "--no-optional-locks", "-C", str(PROJECT.root), "status"]
    try:
        # the training waits for it
        output = subprocess.check_output(
            [*command, "--porcelain=v2", "--branch"],
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=2,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"not recorded ({first_line(error)})"
    lines = output.splitlines()
    commit = lines[0].removeprefix("# branch.oid ")
    if all(line.startswith("#") for line in lines):
        return commit
    return f"{commit}, with uncommitted changes"
