"""The run that --ckpt_path names, and what a resume of it may change."""

import contextlib
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning import LightningModule

from lightbase.cli.command_line import CommandLine
from lightbase.cli.config import LOOKS_ON
from lightbase.cli.old_names import saved_config
from lightbase.cli.trust import Trust
from lightbase.devices.devices import num_processes_started
from lightbase.errors import UserError
from lightbase.folder import PLACE, PROJECT, flatten, folder_to_continue, root_of, versions
from lightbase.module import BaseModule
from lightbase.ranks import say
from lightbase.resume.checkpoints import read_checkpoint

MAY_CHANGE = {
    # the length, the machine, and what only watches
    "trainer": (
        *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"),
        *("accelerator", "devices", "num_nodes", "strategy", "precision"),
        *("benchmark", "deterministic", "limit_test_batches", "num_sanity_val_steps"),
        *("callbacks", "logger", "log_every_n_steps", "profiler", "detect_anomaly"),
        *("enable_model_summary", "enable_progress_bar"),
    ),
    "data": LOOKS_ON,
    "model": ("channels_last", "compile_mode", "compile_net", "per_class", "test_views", "top_k"),
    # flags without a section
    "": (
        *("device_monitor", "figures_every_n_epochs", "step_timer"),
        *("keep_every_epoch", "patience", "stop_on_nan"),
        *("num_threads", "steps_per_execution", "try_network"),
    ),
}
"""Settings that a resume may change, by section of the config. All others must stay."""
NOT_IN_EPOCH = ("trainer.devices", "trainer.num_nodes")
"""Except these in the middle of an epoch: they decide which process gets which batch."""


@dataclass
class Restart:
    """The run that --ckpt_path names.

    name, root: Where the run is now; root None is the default.
    config: The run's config; None if the run was killed before it wrote one.
    path, checkpoint: None if the run was killed before its first checkpoint. Then it starts again.
    folder: Where the run continues; None: a new run starts from the checkpoint.
    trust: What the config may construct; None: anything, for the user's own run.
    """

    name: str
    root: str | None
    config: dict[str, Any] | None = None
    path: Path | None = None
    checkpoint: dict[str, Any] | None = None
    folder: Path | None = None
    trust: Trust | None = None

    @property
    def start_config(self) -> dict[str, Any] | None:
        """The run's config with today's place. Processes that torchrun or SLURM has started count
        instead of the run's devices."""
        if self.config is None:
            return None
        trainer = self.config["trainer"] | {"default_root_dir": self.root}
        if num_processes_started() != (0, 0):
            trainer |= {"devices": "auto", "num_nodes": 1, "strategy": "auto"}
        place = {"ckpt_path": str(self.path or self.folder), "name": self.name}
        return self.config | place | {"trainer": trainer}


def find_restart(line: CommandLine, first_line: CommandLine | None = None) -> Restart | None:
    """The run that --ckpt_path of a command line names, None without --ckpt_path.

    first_line: What the user typed for a run of a sweep, where the command line comes from a file.
    Raises UserError where there is no such run, or where its checkpoint is not sound.
    """
    ckpt_path = line.value("ckpt_path")
    if ckpt_path in (None, "null") or line.has("--print_config"):
        return None
    name, root = line.value("name"), line.value("trainer.default_root_dir")
    if ckpt_path in ("last", "best"):
        restart = newest_run(ckpt_path, str(name or default_name(line)), root)
        if first_line is not None:
            restart.trust = Trust(restart.path or Path(str(restart.folder)), first_line)
        return restart
    path = Path(str(ckpt_path))
    checkpoint = read_checkpoint(path)
    config = checkpoint["config"]
    name, root = str(name or config["name"]), root or root_of(path, str(config["name"]))
    folder = folder_to_continue(path, Path(root or PROJECT.logs), name)
    is_trusted = str(line.value("trust_checkpoint")).lower() == "true"
    trust = None if is_trusted else Trust(path, line)
    return Restart(name, root, config, path, checkpoint, folder, trust)


def default_name(line: CommandLine) -> str:
    """The name of runs of this command if it gives none."""
    if not line.names_experiment:
        return PROJECT.default_config.stem
    model = line.model or line.value("model") or PROJECT.default_model
    return str(model).rpartition(".")[2]


def newest_run(which: str, name: str, root: str | None) -> Restart:
    """The newest run of a name. `last` continues it, or starts it again if it was killed before its
    first checkpoint; `best` starts a new run from it."""
    parent = Path(root or PROJECT.logs) / name
    folders = list(reversed(versions(parent).values()))
    if which == "best":  # not one that was killed before it had a config
        folders = [folder for folder in folders if (folder / "config.yaml").is_file()]
    if not folders:
        way_out = "leave --ckpt_path out to start a run"
        raise UserError(f"ckpt_path {which}: no run in {parent} has one; {way_out}")
    folder = folders[0]
    paths = [folder / "checkpoints" / f"{which}.ckpt" for folder in folders]
    if paths[0].is_file():
        checkpoint = read_checkpoint(paths[0])
        continued = folder if which == "last" else None
        return Restart(name, root, checkpoint["config"], paths[0], checkpoint, continued)
    if which == "last" and not (folder / "metrics.json").exists():
        say(f"{folder} was stopped before its first checkpoint: it starts again")
        file = folder / "config.yaml"
        text = file.read_text(encoding="utf-8") if file.is_file() else "null"
        return Restart(name, root, saved_config(yaml.safe_load(text)), folder=folder)
    older = [path for path in paths if path.is_file()]
    hint = f"; {older[0]} is older: give that path, or leave --ckpt_path out" if older else ""
    raise UserError(f"ckpt_path {which}: the newest run {folder} has no {paths[0].name}{hint}")


def check_changes(
    restart: Restart, model: LightningModule, config: dict[str, Any], line: CommandLine
) -> None:
    """Print the settings that a resume changes, and those of the config files that do not count.
    Raises UserError for a setting that may not change.

    config: The run's config with the flags of the command line.
    """
    changes = changed(restart.config or {}, config, line)
    for key, (old, new) in changes.items():
        if restart.checkpoint is not None and not may_change(key, restart.checkpoint):
            way_out = "leave it out, or start a new run: without --ckpt_path"
            arguments = config["model"].get("init_args", {})
            if isinstance(model, BaseModule) and "weights" in arguments:
                way_out += f" and with --model.weights {restart.path}"
            what = f"--{key} {short(new)}: a resume goes on with {short(old)}"
            raise UserError(f"{what}\n{way_out}", 2)
        say(f"Resume: {key} {short(new)}, before {short(old)}")
    settings = flatten(config)
    for content in line.configs.values():
        for key, value in flatten(content).items():
            if key not in settings or key in (*PLACE, *changes) or agrees(value, settings[key]):
                continue
            what = f"{key} stays {short(settings[key])}"
            say(f"Resume: {what}; the config file's {short(value)} counts as a flag only")


def may_change(key: str, checkpoint: dict[str, Any]) -> bool:
    if key in NOT_IN_EPOCH and is_within_epoch(checkpoint):
        return False
    section, _, rest = f".{key}".rpartition(".") if "." not in key else key.partition(".")
    return rest.partition(".")[0] in MAY_CHANGE.get(section, ())


def is_within_epoch(checkpoint: dict[str, Any]) -> bool:
    epochs = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress")
    return epochs is not None and epochs["current"]["ready"] > epochs["current"]["processed"]


def changed(
    old: dict[str, Any], new: dict[str, Any], line: CommandLine
) -> dict[str, tuple[Any, Any]]:
    """Return {key: (old, new)} for each changed setting. A key that only one config has is included
    only if the user passed it, or a part of its name."""
    old, new = flatten(old), flatten(new)
    flags = {flag.removeprefix("--") for flag, _ in line.flags}
    flags |= {"model"} if line.model else set()
    changes = {}
    for key in new | old:
        parents = {key, *(key[:i] for i, letter in enumerate(key) if letter == ".")}
        in_both = key in old and key in new
        is_changed = old.get(key) != new.get(key) and key not in PLACE
        if is_changed and (in_both or parents & flags):
            changes[key] = (old.get(key), new.get(key))
    return changes


def short(value: Any) -> str:
    return textwrap.shorten(str(value), 80)


def agrees(value: Any, now: Any) -> bool:
    """Whether a config file's value is the run's value. The run's dicts may hold more, such as the
    other arguments of a callback; its paths are absolute, and its 1e-3 is a number."""
    if isinstance(value, dict) and isinstance(now, dict):
        return all(key in now and agrees(value[key], now[key]) for key in value)
    if isinstance(value, list) and isinstance(now, list):
        return len(value) == len(now) and all(map(agrees, value, now))
    if isinstance(value, str) and isinstance(now, float):
        with contextlib.suppress(ValueError):
            return float(value) == now
    return bool(value == now) or str(Path(str(value)).absolute()) == now
