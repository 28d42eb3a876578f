"""A run that continues: which one, and with which changes.

Read `Restart` and `find_restart` first. `find_restart` finds the run that --ckpt_path
names and reads its checkpoint. `resumed_spec` applies the settings of the command to
the saved ones, and refuses a change that would give other results (see `MAY_CHANGE`).
After the model and the data are built, `check_restart` compares them with the
checkpoint.
"""

import json
import os
import shlex
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, LightningModule

from lightbase.core.compat import saved_epochs
from lightbase.core.config_files import path_of_class, read_config
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import num_processes_started, settle_devices
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd
from lightbase.core.folder import logs_folder_of, versions
from lightbase.core.form import state_errors
from lightbase.core.load import (
    check_has_classes,
    load_data_state,
    load_state,
    read_checkpoint,
    todays,
)
from lightbase.core.module import BaseModule
from lightbase.core.names import RUN_LOCATION_KEYS, WITHOUT_EFFECT, flatten
from lightbase.core.parser import EXTRA_FLAGS
from lightbase.core.project import PROJECT, is_own
from lightbase.core.spec import (
    CommandLine,
    RunSpec,
    as_values,
    default_experiment,
    saved_spec,
    spec_without_classes,
)

MAY_CHANGE = {
    # the length, the machine, and what only watches
    "trainer": (
        *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"),
        *("accelerator", "devices", "num_nodes", "strategy", "precision"),
        *("benchmark", "deterministic", "limit_test_batches", "num_sanity_val_steps"),
        *("callbacks", "logger", "log_every_n_steps", "profiler", "detect_anomaly"),
        *("enable_model_summary", "enable_progress_bar"),
    ),
    "data": WITHOUT_EFFECT,
    "model": ("channels_last", "compile_mode", "compile_net", "per_class", "top_k"),
    # flags without a section
    "": ("keep_every_epoch", "num_threads", "patience", "stop_on_nan", "try_network"),
}
"""Settings that a resume may change, by section of the config. All others must
stay."""
NOT_IN_EPOCH = ("trainer.devices", "trainer.num_nodes")
"""Settings that may change between two epochs only: they decide which process gets
which batch."""


@dataclass
class Restart:
    """The run that --ckpt_path names.

    name: The name of the run, without version_N.
    root: The folder of runs that it is in now, or None for the default folder, logs/.
    path: The checkpoint. None if the run was killed before its first one. Then it
        starts again, with its saved config.
    checkpoint: The content of the checkpoint. Without a checkpoint it is a dict with
        the config only.
    folder: The folder of the run if the run continues there. None if a new run starts
        from the checkpoint.
    """

    name: str
    root: str | None
    path: Path | None
    checkpoint: dict[str, Any] = field(repr=False)
    folder: Path | None

    @property
    def start_config(self) -> dict[str, Any]:
        """The saved config, to which the flags of the command are then applied. It has
        today's name and folder, because the files may have been moved. Under torchrun
        or SLURM it leaves the number of processes to them."""
        config = self.checkpoint["config"]
        trainer = config["trainer"] | {"default_root_dir": self.root}
        if num_processes_started() != (0, 0):  # torchrun or SLURM decides
            trainer |= {"devices": "auto", "num_nodes": 1, "strategy": "auto"}
        location = {"name": self.name, "ckpt_path": str(self.path or self.folder)}
        return config | location | {"trainer": trainer}


def find_restart(line: CommandLine) -> Restart | None:
    """Return the run that --ckpt_path names, or None if the command starts a new run.

    --ckpt_path last, or the path of a run's last.ckpt, continues the run in its folder.
    --ckpt_path best, or another path, starts a new run from this checkpoint.

    Raises UserError if there is no such run, if it is somebody else's, or if its
    checkpoint is not sound.
    """
    ckpt_path = line.place("ckpt_path")
    if ckpt_path in (None, "null") or line.names("print_config"):
        return None
    name, root = line.place("name"), line.place("trainer.default_root_dir")
    if ckpt_path in ("last", "best"):
        return restart_by_name(ckpt_path, str(name or default_name(line)), root, line)
    path = Path(str(ckpt_path))
    check_own(path, root, line)
    checkpoint = read_checkpoint(path)
    saved_name = str(checkpoint["config"]["name"])
    name = str(name or saved_name)
    root = root or logs_folder_of(path, saved_name)
    runs = str(Path(root or PROJECT.logs).resolve())
    folder = None
    if path.name == "last.ckpt" and logs_folder_of(path, name) == runs:
        # unlike resolve, realpath takes links in a circle
        folder = Path(os.path.realpath(path)).parent.parent
    return Restart(name, root, path, checkpoint, folder)


def restart_by_name(
    which: str, name: str, root: str | None, line: CommandLine
) -> Restart | None:
    """Return the newest run of this name, or None if the command starts a new run, see
    `start_again`.

    which: "last" or "best".
    root: The folder of all runs, or None for logs/.
    """
    path = newest_checkpoint(which, Path(root or PROJECT.logs) / name)
    check_own(path, root, line)
    folder = path.parent.parent
    if not path.is_file():
        return start_again(folder, name, root, line)
    checkpoint = read_checkpoint(path)
    if which == "best":  # a new run starts from it
        return Restart(name, root, path, checkpoint, None)
    return Restart(name, root, path, checkpoint, folder)


def check_own(path: Path, root: str | None, line: CommandLine) -> None:
    """Raise UserError for a file that is not in the user's folder of runs, unless the
    command has --trust_checkpoint true. A file that does not exist passes."""
    is_trusted = str(line.place("trust_checkpoint")).lower() == "true"
    if path.exists() and not is_own(path, root) and not is_trusted:
        raise UserError(
            f"{path} is not in your folder of runs: only your own trainings are "
            "continued",
            f"to start a new run from its weights: --model.weights {path}",
            2,
        )


def start_again(
    folder: Path, name: str, root: str | None, line: CommandLine
) -> Restart | None:
    """Return a run that was killed before its first checkpoint, and print that it
    starts again.

    folder: The folder of the run.
    Return None if the folder has no config.yaml. Then the command starts a new run.
    Raises UserError if such a command names no experiment.
    """
    file = folder / "config.yaml"
    if file.is_file():
        say(f"{folder} was stopped before its first checkpoint: it starts again")
        config = todays(read_config(file), PROJECT.package)
        return Restart(name, root, None, {"config": config}, folder)
    if not line.names_experiment:
        raise UserError(
            f"{folder} was stopped before it had a config or a checkpoint",
            "leave --ckpt_path out, and name the experiment with --config",
            2,
        )
    say(
        f"{folder} was stopped before it had a config or a checkpoint: this is a new "
        "run"
    )
    return None


def default_name(line: CommandLine) -> str:
    """Return the name of the run for a command without --name: the name of the model's
    class, or "default" if the command trains configs/default.yaml."""
    if not line.names_experiment:
        return default_experiment().stem
    model = line.model or line.file_settings.get("model") or PROJECT.default_model
    return str(model).rpartition(".")[2]


def newest_checkpoint(which: str, parent: Path) -> Path:
    """Return the path of last.ckpt or best.ckpt of the newest run in a folder.

    The file last.ckpt may be missing: then the run was killed before its first
    checkpoint.

    which: "last" or "best".
    parent: The folder ROOT/NAME, with the folders version_N.
    Raises UserError if there is no run, or if the file is missing for another reason.
    """
    folders = [*versions(parent).values()]
    if not folders:
        raise UserError(
            f"ckpt_path {which}: no run in {parent} has one; "
            "leave --ckpt_path out to start a run"
        )
    path = folders[-1] / "checkpoints" / f"{which}.ckpt"
    was_killed = which == "last" and not (folders[-1] / "metrics.json").exists()
    if not path.is_file() and not was_killed:
        raise UserError(
            f"ckpt_path {which}: the newest run {folders[-1]} has no {path.name}",
            "leave --ckpt_path out, or give the path of another run's checkpoint",
        )
    return path


def resumed_spec(restart: Restart, line: CommandLine) -> RunSpec:
    """Return the record of a run that continues: its saved config with the changes of
    this command, which are printed.

    Raises UserError for a change that a resume cannot make, and for a run whose model
    and data were Python objects.
    """
    check_has_classes(restart.checkpoint["config"], restart.path or Path())
    origin = "resume" if restart.folder else "checkpoint"
    spec = saved_spec(restart.start_config, line, origin)
    spec.folder = restart.folder
    spec.checkpoint = restart.path
    settle_devices(spec.config.trainer)
    settings = flatten(as_values(spec))
    say_unused(restart, line, spec.given, settings)
    check_changes(restart, spec.given, settings)
    return spec


def spec_of_objects(
    module: LightningModule,
    data: LightningDataModule,
    line: CommandLine,
    restart: Restart | None,
) -> RunSpec:
    """Return the record of a training whose model and data are Python objects. It
    describes both objects by their classes only.

    line: The other settings, as arguments of a command.
    restart: The run that continues, or None for a new run.
    Raises UserError for a change that a resume cannot make.
    """
    saved = restart.start_config if restart else {}
    spec = spec_without_classes(saved, line)
    spec.config.model = {"class_path": class_path_of(module)}
    spec.config.data = {"class_path": class_path_of(data)}
    if restart:
        spec.origin = "resume" if restart.folder else "checkpoint"
        spec.folder = restart.folder
        spec.checkpoint = restart.path
        settle_devices(spec.config.trainer)
        check_changes(restart, spec.given, flatten(as_values(spec)))
    return spec


def class_path_of(value: Any) -> str:
    """Return the import path of an object's class, such as "my.models.mlp.MLP"."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def say_unused(
    restart: Restart, line: CommandLine, given: frozenset[str], now: dict[str, Any]
) -> None:
    """Print each setting of the config files that the resumed run does not use, and how
    to use it. A resume takes its settings from the checkpoint and from flags. A config
    file may have changed since the run started.

    given: The names of the settings that flags set.
    now: The settings of the resumed run, by the names of flags.
    """
    other_classes: list[str] = []
    for key, value in line.file_settings.items():
        if key in (*RUN_LOCATION_KEYS, *given) or is_same(value, now.get(key)):
            continue
        if key.startswith(tuple(other_classes)):  # an argument of another class
            continue
        other_classes.append(f"{key}.")
        way_out = "start a new run, without --ckpt_path"
        if may_change(key, restart.checkpoint):
            text = value
            if not isinstance(value, str):
                text = json.dumps(value, default=str)
            way_out = f"add --{key} {shlex.quote(text)}"
        say(f"Resume: {key} stays {now.get(key)}; to use {value} {way_out}")


def is_same(value: Any, now: Any) -> bool:
    """Return whether a value of a config file means the same as a value of the run.

    value: The value in the file, maybe with the bare name of a class or a relative
        path.
    now: The value in the run, with import paths and absolute paths.
    """
    if str(value) == str(now):
        return True
    if not isinstance(value, str) or not isinstance(now, str):
        return False
    return now in (path_of_class(value), str(Path(value).absolute()))


def check_changes(restart: Restart, given: frozenset[str], new: dict[str, Any]) -> None:
    """Print each setting that a resume changes, with its old value. Raises UserError
    for a setting that may not change, see `may_change`.

    given: The names of the settings that flags set.
    new: All settings of the resumed run, by the names of flags.
    """
    old = flatten(restart.checkpoint["config"])
    for key in old | new:
        # another version of a class may have other arguments: they count if a flag
        # names them
        counts = (key in old and key in new) or key in given
        if (
            key in RUN_LOCATION_KEYS
            or str(old.get(key)) == str(new.get(key))
            or not counts
        ):
            continue
        now = textwrap.shorten(str(new.get(key)), 80)
        before = textwrap.shorten(str(old.get(key)), 80)
        if not may_change(key, restart.checkpoint):
            way_out = "leave it out, or start a new run: without --ckpt_path"
            if restart.path:
                way_out += f" and with --model.weights {restart.path}"
            problem = f"--{key} {now}: a resume goes on with {before}"
            raise UserError(problem, way_out, 2)
        say(f"Resume: {key} {now}, before {before}")


def may_change(key: str, checkpoint: dict[str, Any]) -> bool:
    """Return whether a resume may change a setting: it is in `MAY_CHANGE` or belongs to
    an extra. In the middle of an epoch, settings in `NOT_IN_EPOCH` have to stay.

    key: The name of the setting, such as "trainer.max_epochs".
    """
    if key in NOT_IN_EPOCH and is_within_epoch(checkpoint):
        return False
    section, *names = key.split(".")
    if names:
        return names[0] in MAY_CHANGE.get(section, ())
    return key in (*MAY_CHANGE[""], *(name for name, _, _ in EXTRA_FLAGS))


def is_within_epoch(checkpoint: dict[str, Any]) -> bool:
    """Return whether a checkpoint was written in the middle of an epoch. A checkpoint
    without the state of a training was not."""
    if "loops" not in checkpoint:
        return False
    current = saved_epochs(checkpoint)["current"]
    return current["ready"] > current["processed"]


def check_restart(
    restart: Restart, spec: RunSpec, model: LightningModule, data: LightningDataModule
) -> None:
    """Check that the training can continue with this model and data. Give the data the
    state in the checkpoint, and free the memory of the checkpoint.

    Lightning later reads the file again and restores model and optimizer. This check
    comes first, so that a mistake is found before the data is loaded.

    Raises UserError if the weights, the state or the number of epochs does not fit.
    """
    path = restart.path
    if path is None:
        return
    say(f"Checkpoint: {relative_to_cwd(path)}")
    with state_errors(path):
        check_resume(restart.checkpoint, model, spec.config.trainer.max_epochs, path)
        if isinstance(data, BaseDataModule):  # its splits may depend on the state
            load_data_state(restart.checkpoint, data)
    if isinstance(model, BaseModule):
        model.has_weights = True  # the run began with its weights
    restart.checkpoint = {}  # its memory is free when Lightning reads the file


def check_resume(
    checkpoint: dict[str, Any],
    model: LightningModule,
    max_epochs: int | None,
    path: Path,
) -> None:
    """Raise UserError if the training of the checkpoint cannot continue with this model
    and number of epochs. The model then has the weights of the checkpoint.

    max_epochs: The value of --trainer.max_epochs; -1 or None for no limit.
    path: The checkpoint, for the message.
    """
    load_state(checkpoint, model, path)
    needed = {"loops", "optimizer_states", "lr_schedulers", "callbacks"}
    if not needed <= checkpoint.keys():
        raise UserError(
            f"checkpoint {path} holds weights only: the state of its training is "
            "missing"
        )
    num_trained = saved_epochs(checkpoint)["current"]["processed"]
    if max_epochs is not None and 0 <= max_epochs < num_trained:
        raise UserError(
            f"checkpoint {path} has {num_trained} epochs behind it: "
            f"give --trainer.max_epochs more than {max_epochs}",
            status=2,
        )
    if max_epochs == num_trained:
        say(
            f"All {num_trained} epochs are trained already; "
            f"--trainer.max_epochs {2 * num_trained} would go on"
        )
