"""A run and its checkpoint: rebuilt for evaluate.py, predict.py and export.py, or
trained on."""

import json
import os
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule

from lightbase.core.command_line import (
    CommandLine,
    checked,
    default_experiment,
    read_config,
    renamed,
)
from lightbase.core.compat import parse_unvalidated
from lightbase.core.config import LOOKS_ON, write_config
from lightbase.core.data import SPLIT_ARGUMENTS, BaseDataModule
from lightbase.core.devices import num_processes_started
from lightbase.core.errors import UserError, say
from lightbase.core.folder import (
    PLACE,
    PROJECT,
    flatten,
    is_own,
    root_of,
    short,
    versions,
)
from lightbase.core.form import check_form, state_errors
from lightbase.core.module import BaseModule
from lightbase.core.objects import check_no_objects
from lightbase.core.training_cli import TrainingCLI
from lightbase.core.transfer import load_checked, load_weights, read_weights

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
    "model": ("channels_last", "compile_mode", "compile_net", "per_class", "top_k"),
    # flags without a section
    "": (
        *("device_monitor", "figures_every_n_epochs", "step_timer"),
        *("keep_every_epoch", "patience", "stop_on_nan"),
        *("num_threads", "steps_per_execution", "try_network"),
    ),
}
"""Settings that a resume may change, by section of the config. All others must stay."""
NOT_IN_EPOCH = ("trainer.devices", "trainer.num_nodes")
"""Except these in the middle of an epoch: they decide which process gets which
batch."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A run's checkpoint, with today's names of classes. Raises UserError for a file
    that is missing, damaged, unsafe or not of a run."""
    checkpoint = load_checked(path)
    config: Any = checkpoint.get("config") if isinstance(checkpoint, dict) else None
    if not is_config(config) or "state_dict" not in checkpoint:
        what = "it lacks the weights or the config that train.py saves"
        raise UserError(f"{path} is no checkpoint of a run: {what}")
    if "lightbase" not in checkpoint or "package" not in checkpoint:
        what = "was written before version 0.3, and only such a version can read it"
        raise UserError(f"checkpoint {path} {what}")
    check_form(checkpoint, path)
    config.pop("config", None)  # the flag --config would read a file
    checkpoint["config"] = renamed(config, checkpoint["package"])
    return checkpoint


def is_config(config: Any) -> bool:
    """Whether it has the form that train.py saves. jsonargparse would take a key with a
    dot for a part of another one."""
    try:
        checked(config)
    except ValueError:
        return False
    if not isinstance(config, dict) or any("." in str(key) for key in config):
        return False
    for name in ("model", "data"):
        part = config.get(name)
        if not isinstance(part, dict) or not isinstance(part.get("class_path"), str):
            return False
        if not isinstance(part.get("init_args", {}), dict):
            return False
    return isinstance(config.get("trainer"), dict)


def load_run(path: Path, flags: Sequence[str] = (), trust: bool = False) -> TrainingCLI:
    """The model with the weights of a checkpoint, and the data.

    Both are rebuilt from the config in the checkpoint if the file is the user's, see
    `is_own`, or with `trust`. They are those of the user's YAML if the flags have
    --config; then any file gives the weights.

    flags: --config, and --data.* and --trainer.* flags that differ from the config.
    Raises UserError where the file is not a sound checkpoint, is somebody else's, or
    does not fit today's code.
    """
    line = CommandLine(flags)
    if "null" in (line.value("data.num_folds"), line.value("data.init_args.num_folds")):
        line.flags.append(("--data.fold", "null"))  # of none
    if line.configs:
        return load_into(path, line)
    checkpoint = read_checkpoint(path)
    config = checkpoint["config"]
    if not trust and not is_own(path, line.value("trainer.default_root_dir")):
        what = f"{path} is not in your folder of runs; it names {', '.join(classes_in(config))}"
        way_out = "give --config FILE, a YAML of yours; or --trust_checkpoint true, in Python "
        raise UserError(
            what, f"{way_out}trust=True, if you would run it as a program", 2
        )
    check_no_objects(config, path)
    # the devices of the run may not be here; what changes the result stays
    names = ("precision", "limit_test_batches")
    trainer = {key: config["trainer"][key] for key in names if key in config["trainer"]}
    if config["trainer"].get("accelerator") == "cpu":
        trainer["accelerator"] = "cpu"
    cli = TrainingCLI(line.flag_args, saved=config | {"trainer": trainer})
    check_split(config, cli.config.data, path)
    with state_errors(path):
        cli.model.on_load_checkpoint(checkpoint)  # as Lightning does
        load_state(checkpoint, cli.model, path)
        load_data_state(checkpoint, cli.datamodule)
    return cli


def load_into(path: Path, line: CommandLine) -> TrainingCLI:
    """The model and the data that the user's YAML names, with the weights of any
    file."""
    content = read_weights(path)
    config: Any = content.get("config") if isinstance(content, dict) else None
    cli = TrainingCLI(line.parser_args)
    if is_config(config):
        check_split(config, cli.config.data, path, has_state=False)
    if isinstance(
        cli.datamodule, BaseDataModule
    ):  # predictions need its classes and shapes
        state = (
            content.get(type(cli.datamodule).__qualname__)
            if is_config(config)
            else None
        )
        if isinstance(state, dict):
            # until version 0.3 the test part followed from split_seed
            cli.datamodule.test_seed = int(
                state.get("test_seed", cli.datamodule.split_seed)
            )
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
    load_weights(cli.model, str(path), is_complete=True, content=content)
    return cli


def classes_in(config: Any, key: str = "") -> list[str]:
    """The class paths in a config, five at most."""
    found = [str(config)[:60]] if key == "class_path" else []
    if isinstance(config, list):
        config = dict(enumerate(config))
    for name, value in config.items() if isinstance(config, dict) else ():
        found += classes_in(value, str(name))
    return [*dict.fromkeys(found)][:5]


def check_split(
    trained: dict[str, Any], data: Namespace, path: Path, has_state: bool = True
) -> None:
    """Raise UserError where other samples than in the training would be those for
    training, validation and test.

    trained: The config in a checkpoint. data: That of the data now.
    has_state: The data gets its state, so that it refuses to test a fold without its
        number.
    """
    before, now = (
        trained["data"].get("init_args", {}),
        vars(data.get("init_args", Namespace())),
    )
    for name in before.keys() & now.keys() & {*SPLIT_ARGUMENTS}:
        if name in ("num_folds", "fold") and now[name] is None and has_state:
            continue  # the data's own test set, in which no sample of a fold is
        if now[name] != before[name]:
            what = f"--data.{name} {now[name]}: the training of {short(path)} had {before[name]}"
            way_out = "leave it as it was: a test may not have samples of the training"
            raise UserError(what, way_out, 2)


def load_data_state(checkpoint: dict[str, Any], data: LightningDataModule) -> None:
    """Let the data have the classes, the splits and the order that a run has saved."""
    state = checkpoint.get(type(data).__qualname__)
    if state is not None:
        data.load_state_dict(state)


def load_state(checkpoint: dict[str, Any], model: LightningModule, path: Path) -> None:
    """Load the weights. Raises UserError if they are those of another network."""
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, TypeError) as error:
        config = flatten(checkpoint["config"]["model"], "model")
        trained = f"it was trained with {config.get('model.net', config['model'])}"
        reason = textwrap.shorten(str(error).splitlines()[-1], 300)
        raise UserError(
            f"checkpoint {path} is of another model: {reason}", trained
        ) from error


@dataclass
class Restart:
    """The run that --ckpt_path names.

    name, root: Where the run is now; root None is the default.
    path: Of the checkpoint; None if the run was killed before its first one. It starts
        again.
    checkpoint: Its content; of such a run only the config.
    folder: Where the run continues; None: a new run starts from the checkpoint.
    """

    name: str
    root: str | None
    path: Path | None
    checkpoint: dict[str, Any]
    folder: Path | None

    @property
    def start_config(self) -> dict[str, Any]:
        """The run's config with today's place. Processes that torchrun or SLURM has
        started count instead of the run's devices."""
        config: dict[str, Any] = self.checkpoint["config"]
        trainer = config["trainer"] | {"default_root_dir": self.root}
        if num_processes_started() != (0, 0):
            trainer |= {"devices": "auto", "num_nodes": 1, "strategy": "auto"}
        place = {"ckpt_path": str(self.path or self.folder), "name": self.name}
        return config | place | {"trainer": trainer}


def find_restart(line: CommandLine) -> Restart | None:
    """The run that --ckpt_path of a command line names, None without --ckpt_path.

    Raises UserError where there is no such run, where it is somebody else's, or where
    its checkpoint is not sound.
    """
    ckpt_path = line.value("ckpt_path")
    only_prints = any(flag == "--print_config" for flag, _ in line.flags)
    if ckpt_path in (None, "null") or only_prints:
        return None
    name, root = line.value("name"), line.value("trainer.default_root_dir")
    is_of_name = ckpt_path in ("last", "best")
    if is_of_name:
        name = str(name or default_name(line))
        path = newest_checkpoint(ckpt_path, Path(root or PROJECT.logs) / name)
    else:
        path = Path(str(ckpt_path))
    is_trusted = (
        is_own(path, root) or str(line.value("trust_checkpoint")).lower() == "true"
    )
    if path.exists() and not is_trusted:
        what = f"{path} is not in your folder of runs: only your own trainings are continued"
        raise UserError(
            what, f"to start a new run from its weights: --model.weights {path}", 2
        )
    # unlike resolve, realpath takes links in a circle
    folder = (path if is_of_name else Path(os.path.realpath(path))).parent.parent
    if is_of_name and not path.is_file():
        return start_again(folder, name, root, line)
    checkpoint = read_checkpoint(path)
    goes_on = path.name == "last.ckpt"
    if not is_of_name:
        saved_name = str(checkpoint["config"]["name"])
        name, root = str(name or saved_name), root or root_of(path, saved_name)
        goes_on &= root_of(path, name) == str(Path(root or PROJECT.logs).resolve())
    return Restart(name, root, path, checkpoint, folder if goes_on else None)


def start_again(
    folder: Path, name: str, root: str | None, line: CommandLine
) -> Restart | None:
    """A run that was killed before its first checkpoint; None if it has no config
    either. Then the command has to name an experiment, and is a new run."""
    file = folder / "config.yaml"
    if file.is_file():
        say(f"{folder} was stopped before its first checkpoint: it starts again")
        config = read_config(file)
        return Restart(name, root, None, {"config": config}, folder)
    if not line.names_experiment:
        what = f"{folder} was stopped before it had a config or a checkpoint"
        raise UserError(
            what, "leave --ckpt_path out, and name the experiment with --config", 2
        )
    say(
        f"{folder} was stopped before it had a config or a checkpoint: this is a new run"
    )
    return None


def default_name(line: CommandLine) -> str:
    """The name of runs of this command if it gives none."""
    if not line.names_experiment:
        return default_experiment().stem
    model = line.model or line.value("model") or PROJECT.default_model
    return str(model).rpartition(".")[2]


def newest_checkpoint(which: str, parent: Path) -> Path:
    """last.ckpt or best.ckpt of the newest run in a folder. last.ckpt is missing if the
    run was killed before its first checkpoint."""
    folders = [*versions(parent).values()]
    if not folders:
        way_out = "leave --ckpt_path out to start a run"
        raise UserError(f"ckpt_path {which}: no run in {parent} has one; {way_out}")
    path = folders[-1] / "checkpoints" / f"{which}.ckpt"
    was_killed = which == "last" and not (folders[-1] / "metrics.json").exists()
    if not path.is_file() and not was_killed:
        what = f"ckpt_path {which}: the newest run {folders[-1]} has no {path.name}"
        way_out = "leave --ckpt_path out, or give the path of another run's checkpoint"
        raise UserError(what, way_out)
    return path


def go_on(restart: Restart, cli: TrainingCLI, line: CommandLine) -> None:
    """Let the run continue with the model and the config of `cli`. Raises UserError
    where it cannot.

    line: the command line, whose flags `cli` has parsed.
    """
    cli.restart = restart
    config = write_config(cli.parser, cli.config)[0]
    say_unused(restart, cli, line)
    check_changes(restart, cli.model, config, line)
    if restart.path is None:
        return
    say(f"Checkpoint: {short(restart.path)}")
    with state_errors(restart.path):
        check_resume(restart.checkpoint, cli.model, cli.config, restart.path)
        if isinstance(cli.datamodule, BaseDataModule):  # its splits may depend on it
            load_data_state(restart.checkpoint, cli.datamodule)
    if isinstance(cli.model, BaseModule):
        cli.model.has_weights = (
            True  # the run began with its weights; do not load them again
        )
    restart.checkpoint = {}  # its memory is free when Lightning reads it


def say_unused(restart: Restart, cli: TrainingCLI, line: CommandLine) -> None:
    """Print the settings of the config files that the resume does not take."""
    flags = [flag for flag in line.flag_args if "+=" not in flag]
    args = [*(f"--config={path}" for path in line.configs), *flags]
    with_files = parse_unvalidated(
        cli.parser.parse_args, args, namespace=cli.config.clone()
    )
    now = flatten(cli.config.as_dict())
    for key, value in flatten(with_files.as_dict()).items():
        if key not in (*PLACE, "config") and value != now.get(key):
            way_out = "start a new run, without --ckpt_path"
            if may_change(key, restart.checkpoint):
                text = (
                    value if isinstance(value, str) else json.dumps(value, default=str)
                )
                way_out = f"add --{key} {shlex.quote(text)}"
            say(f"Resume: {key} stays {now.get(key)}; to use {value} {way_out}")


def check_changes(
    restart: Restart, model: LightningModule, config: dict[str, Any], line: CommandLine
) -> None:
    """Print the settings that a resume changes. Raises UserError for one that may not
    change.

    config: The run's config with the flags of the command line.
    """
    old, new = flatten(restart.checkpoint["config"]), flatten(config)
    flags = tuple(flag.removeprefix("--") + "." for flag, _ in line.flags)
    flags += ("model.",) if line.model else ()
    for key in old | new:
        # another version of a class may have other arguments: they count if a flag
        # names them
        counts = key in old.keys() & new.keys() or f"{key}.".startswith(flags)
        if key in PLACE or str(old.get(key)) == str(new.get(key)) or not counts:
            continue
        now, before = (
            textwrap.shorten(str(config.get(key)), 80) for config in (new, old)
        )
        if not may_change(key, restart.checkpoint):
            way_out = "leave it out, or start a new run: without --ckpt_path"
            if isinstance(model, BaseModule) and restart.path:
                way_out += f" and with --model.weights {restart.path}"
            raise UserError(
                f"--{key} {now}: a resume goes on with {before}", way_out, 2
            )
        say(f"Resume: {key} {now}, before {before}")


def may_change(key: str, checkpoint: dict[str, Any]) -> bool:
    epochs = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress")
    is_within_epoch = (
        epochs and epochs["current"]["ready"] > epochs["current"]["processed"]
    )
    if key in NOT_IN_EPOCH and is_within_epoch:
        return False
    section, name, *_ = key.split(".") if "." in key else ("", key)
    return name in MAY_CHANGE.get(section, ())


def check_resume(
    checkpoint: dict[str, Any], model: LightningModule, config: Namespace, path: Path
) -> None:
    """Raise UserError where the training of the checkpoint cannot go on with this model
    and config."""
    load_state(checkpoint, model, path)
    if (
        not {"loops", "optimizer_states", "lr_schedulers", "callbacks"}
        <= checkpoint.keys()
    ):
        what = "the state of its training is missing"
        raise UserError(f"checkpoint {path} holds weights only: {what}")
    max_epochs = config.trainer.max_epochs
    done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if max_epochs is not None and 0 <= max_epochs < done:
        more = f"give --trainer.max_epochs more than {max_epochs}"
        raise UserError(
            f"checkpoint {path} has {done} epochs behind it: {more}", status=2
        )
    if max_epochs == done:
        say(
            f"All {done} epochs are trained already; --trainer.max_epochs {2 * done} would go on"
        )
