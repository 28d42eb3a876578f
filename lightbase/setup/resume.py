"""A run that continues: which one, and with which changes.

Read `Restart` and `find_restart` first. `find_restart` finds the run that --ckpt_path
names and reads its checkpoint. `resumed_spec` applies the settings of the command to
the saved ones, and refuses a change that would give other results (see `MAY_CHANGE`).
After the model and the data are built, `load_restart` gives them the weights
and the state in the checkpoint.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, LightningModule

from lightbase.compat import saved_epochs, saved_logged_step
from lightbase.config.errors import UserError, say
from lightbase.config.files import relative_to_cwd
from lightbase.config.known_errors import noted
from lightbase.config.paths import PROJECT
from lightbase.config.spec import (
    CommandLine,
    RunSpec,
    as_values,
    default_experiment,
    read_spec,
)
from lightbase.config.yaml_files import (
    RUN_LOCATION_KEYS,
    WITHOUT_EFFECT,
    flatten,
    read_config,
)
from lightbase.data.module import BaseDataModule
from lightbase.model.module import BaseModule
from lightbase.run.devices import num_processes_started, settle_devices
from lightbase.run.folder import (
    check_name,
    logs_folder_of,
    newest_version,
    run_of_torchrun,
    torchrun_id,
)
from lightbase.run.state import note_on_state
from lightbase.setup.load import (
    check_has_classes,
    check_own,
    load_data_state,
    load_state,
    read_checkpoint,
)

MAY_CHANGE = {
    # the length
    "trainer.max_epochs",
    "trainer.min_epochs",
    "trainer.max_steps",
    "trainer.min_steps",
    "trainer.max_time",
    # the machine
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.precision",
    "trainer.benchmark",
    "trainer.deterministic",
    "num_threads",
    "cuda_graphs",
    "model.channels_last",
    "model.compile_mode",
    "model.compile_net",
    *[f"data.{name}" for name in WITHOUT_EFFECT],
    # what only watches
    "checks",
    "try_network",
    "stop_on_nan",
    "device_monitor",
    "step_timer",
    "figures_every_n_epochs",
    "trainer.limit_test_batches",
    "trainer.num_sanity_val_steps",
    "trainer.callbacks",
    "trainer.logger",
    "trainer.log_every_n_steps",
    "trainer.profiler",
    "trainer.detect_anomaly",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "model.per_class",
    "model.top_k",
    "keep_every_epoch",
    "checkpoint_minutes",
    "test",
    "patience",
}
"""Settings that a resume may change, with all settings below them. All others must
stay."""

TRUE = ("true", "True")

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
    checkpoint: dict[str, Any]
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
        return config | {"name": self.name, "trainer": trainer}


def find_restart(line: CommandLine, restarts: bool = False) -> Restart | None:
    """Return the run that --ckpt_path names, or None if the command starts a new run.
    restarts: Whether torchrun may have started the command again, see `restarted_run`.

    --ckpt_path last, or the path of the newest state of a run (see `is_newest`),
    continues the run in its folder. --ckpt_path best, or another path, starts a new run
    from this checkpoint.

    Raises UserError if there is no such run, if it is somebody else's, or if its
    checkpoint is not sound.
    """
    if line.place("print_config") in TRUE:
        return None
    ckpt_path = line.place("ckpt_path")
    restarted = None
    if restarts and ckpt_path is None:
        restarted = restarted_run(line)
    if restarted:
        say(
            f"torchrun's job {torchrun_id()} continues {relative_to_cwd(restarted)}; "
            "another --rdzv-id starts a new run"
        )
        ckpt_path = "last"
    if ckpt_path is None:
        return None
    path = PROJECT.found(ckpt_path)
    if ckpt_path in ("last", "best"):
        path = newest_checkpoint(ckpt_path, restarted or newest_run(line))
    root = line.place("trainer.default_root_dir")
    if line.place("trust_checkpoint") not in TRUE:
        way_out = f"to start a new run from its weights: --model.weights {path}"
        check_own(path, root, way_out)
    folder = path.parent.resolve().parent  # last.ckpt may be a link
    was_saved = ckpt_path != "last" or path.is_file()
    if was_saved:
        checkpoint = read_checkpoint(path)
    else:
        say(f"{folder} was stopped before its first checkpoint: it starts again")
        checkpoint = {"config": read_config(folder / "config.yaml")}
    saved_name = checkpoint["config"]["name"]
    saved_root = logs_folder_of(path, saved_name)
    name = line.place("name") or saved_name
    root = root or saved_root
    # the newest state continues its run, unless the name or the root differs
    is_in_place = name == saved_name and str(Path(root or "").resolve()) == saved_root
    continues = ckpt_path == "last" or (is_newest(path, checkpoint) and is_in_place)
    return Restart(
        name,
        root,
        path if was_saved else None,
        checkpoint,
        folder if continues else None,
    )


def is_newest(path: Path, checkpoint: dict[str, Any]) -> bool:
    """Return whether a checkpoint is the newest state of its run: last.ckpt, or a file
    of the user's ModelCheckpoint with more steps."""
    last = path.with_name("last.ckpt")
    if path.name in ("last.ckpt", "best.ckpt") or not last.exists():
        return path.name != "best.ckpt"
    saved: int = read_checkpoint(last)["global_step"]
    return bool(checkpoint["global_step"] > saved)


def restarted_run(line: CommandLine) -> Path | None:
    """Return the run that this command continues without --ckpt_path, or None.
    torchrun has started it again, because a process had ended.

    Machines that have lost no process, and new machines, count no restart. So a run
    with a last.ckpt belongs to its --rdzv-id until it is complete. Without --rdzv-id,
    torchrun's id is "none".
    """
    if not torchrun_id():
        return None
    run = run_of_torchrun(newest_run(line).parent)
    if run is None or (run / "metrics.json").exists():
        return None
    has_id = torchrun_id() != "none"
    # a process that starts late may find the folder that the first one has just made
    is_known = has_id and (run / "checkpoints" / "last.ckpt").exists()
    has_count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return run if is_known or has_count else None


def newest_run(line: CommandLine) -> Path:
    """Return the newest run of the name that a command gives. The folder does not exist
    if there is no run."""
    root = Path(line.place("trainer.default_root_dir") or PROJECT.logs)
    name = line.place("name") or default_name(line)
    check_name(root, name)
    return newest_version(root / name)


def default_name(line: CommandLine) -> str:
    """Return the name of the run for a command without --name: the name of the model's
    class, or "default" if the command trains configs/default.yaml."""
    if not line.names_experiment:
        return default_experiment().stem
    model = line.model or line.file_settings.get("model") or PROJECT.default_model
    return str(model).rpartition(".")[2]


def newest_checkpoint(which: str, run: Path) -> Path:
    """Return the path of last.ckpt or best.ckpt of a run.

    The file last.ckpt may be missing: then the run was killed before its first
    checkpoint.

    which: "last" or "best".
    run: The result of `newest_run`.
    Raises UserError if there is no run, or if the file is missing for another reason.
    """
    if not run.exists():
        raise UserError(
            f"ckpt_path {which}: no run in {run.parent} has one",
            "leave --ckpt_path out to start a run",
        )
    path = run / "checkpoints" / f"{which}.ckpt"
    has_ended = (run / "metrics.json").exists()
    if not path.is_file() and (which == "best" or has_ended):
        raise UserError(
            f"ckpt_path {which}: the newest run {run} has no {path.name}",
            "leave --ckpt_path out, or give the path of another run's checkpoint",
        )
    return path


def resumed_spec(
    restart: Restart, line: CommandLine, objects: dict[str, Any] | None = None
) -> RunSpec:
    """Return the record of a run that continues: its saved config with the changes of
    this command, which are printed.

    objects: The config of a model and of data that are Python objects: their classes,
        see `lightbase.train`. None builds both from the saved config.
    Raises UserError for a change that a resume cannot make, and for a run of objects
    without the objects.
    """
    saved = restart.start_config
    model: str | None = PROJECT.default_model
    if objects is None:
        check_has_classes(saved)
    else:
        saved |= objects
        model = None
    spec = read_spec([saved], line, model, is_complete=True)
    spec.folder = restart.folder
    spec.checkpoint = restart.path
    settle_devices(spec.config.trainer)
    if line.configs:
        say("Resume: config files do not count, only the checkpoint and flags")
    check_changes(restart, spec.given, flatten(as_values(spec)))
    return spec


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
        before, now = str(old.get(key)), str(new.get(key))
        if key in RUN_LOCATION_KEYS or before == now or not counts:
            continue
        if not may_change(key, restart.checkpoint):
            way_out = "leave it out, or start a new run: without --ckpt_path"
            if restart.path:
                way_out += f" and with --model.weights {restart.path}"
            problem = f"--{key} {now}: a resume keeps {before}"
            if key in NOT_IN_EPOCH:
                problem += " in the middle of an epoch"
            raise UserError(problem, way_out, 2)
        say(f"Resume: {key} {now}, before {before}")


def may_change(key: str, checkpoint: dict[str, Any]) -> bool:
    """Return whether a resume may change a setting: it is in `MAY_CHANGE`. In the
    middle of an epoch, settings in `NOT_IN_EPOCH` have to stay.

    key: The name of the setting, such as "trainer.max_epochs".
    """
    if key in NOT_IN_EPOCH and "loops" in checkpoint:
        epochs = saved_epochs(checkpoint)["current"]
        if epochs["ready"] > epochs["processed"]:
            return False
    return ".".join(key.split(".")[:2]) in MAY_CHANGE


def load_restart(
    restart: Restart, spec: RunSpec, model: LightningModule, data: LightningDataModule
) -> None:
    """Give the model the weights and the data the state in the checkpoint, and print
    where the training continues.

    Lightning later reads the file again and restores model and optimizer. This comes
    first, so that a mistake is found before the data is loaded. Weights in a folder of
    shards are left to Lightning: a process may not have room for all of them.

    Raises UserError if the weights, the state or the number of epochs does not fit.
    """
    path = restart.path
    if path is None:
        return
    checkpoint = restart.checkpoint
    max_epochs = spec.config.trainer.max_epochs
    if "loops" not in checkpoint:
        raise UserError(
            f"checkpoint {path} holds weights only",
            f"a new run can start with them: --model.weights {path}",
        )
    with noted(note_on_state(path)):
        if "shards" not in checkpoint:
            load_state(checkpoint, model, path)
        num_trained = saved_epochs(checkpoint)["current"]["processed"]
        if max_epochs is not None and 0 <= max_epochs < num_trained:
            raise UserError(
                f"checkpoint {path} has {num_trained} epochs behind it",
                f"give --trainer.max_epochs more than {num_trained}",
                2,
            )
        say(
            f"Resumes {relative_to_cwd(restart.folder or path)} at epoch "
            f"{num_trained + 1}, step {saved_logged_step(checkpoint):,}"
        )
        if max_epochs == num_trained:
            say(
                f"All {num_trained} epochs are trained already; "
                f"--trainer.max_epochs {2 * num_trained} trains more"
            )
        if isinstance(data, BaseDataModule):  # its splits may depend on the state
            load_data_state(checkpoint, data)
    if isinstance(model, BaseModule):
        model.has_weights = True  # the run began with its weights
