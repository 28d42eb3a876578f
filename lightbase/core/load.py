"""A run rebuilt from its checkpoint, for evaluate.py, predict.py and export.py."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule

from lightbase.core.build import build
from lightbase.core.checkpoint import load_checked
from lightbase.core.config_files import checked, renamed
from lightbase.core.data import SPLIT_ARGUMENTS, BaseDataModule
from lightbase.core.errors import UserError
from lightbase.core.files import relative_to_cwd
from lightbase.core.form import check_form, state_errors
from lightbase.core.names import flatten
from lightbase.core.project import is_own
from lightbase.core.spec import CommandLine, RunSpec, new_spec, saved_spec
from lightbase.core.transfer import load_weights, read_weights

Loaded = tuple[RunSpec, LightningModule, LightningDataModule]
"""A run: its record, its model and its data."""
REMOVED = ("steps_per_execution",)
"""Settings of version 0.3 that are gone. They changed nothing in what was trained."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return a run's checkpoint, with today's names of classes.

    Raises UserError for a file that is missing, damaged, unsafe or not of a run.
    """
    checkpoint = load_checked(path)
    config: Any = None
    if isinstance(checkpoint, dict):
        config = checkpoint.get("config")
    if not is_config(config) or "state_dict" not in checkpoint:
        raise UserError(
            f"{path} is no checkpoint of a run: it lacks the weights or the config "
            "that train.py saves"
        )
    if "lightbase" not in checkpoint or "package" not in checkpoint:
        raise UserError(
            f"checkpoint {path} was written before version 0.3, and only such a "
            "version can read it"
        )
    check_form(checkpoint, path)
    config.pop("config", None)  # the flag --config would read a file
    checkpoint["config"] = todays(config, checkpoint["package"])
    return checkpoint


def todays(config: dict[str, Any], package: str) -> dict[str, Any]:
    """Return the config of a run with the names of today. package: See `renamed`."""
    kept = {key: value for key, value in config.items() if key not in REMOVED}
    return renamed(kept, package)  # type: ignore[no-any-return]


def is_config(config: Any) -> bool:
    """Return whether a value has the form of the config that train.py saves.

    jsonargparse would take a key with a dot for a part of another one.
    """
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


def load_run(path: Path, flags: Sequence[str] = (), trust: bool = False) -> Loaded:
    """Return the record of a run, its model with the weights of a checkpoint, and its
    data.

    Model and data are rebuilt from the config in the checkpoint if the file is the
    user's, see `is_own`, or with `trust`. If the flags have --config, the user's YAML
    names them, and any file gives the weights.

    flags: --config, and --data.* and --trainer.* flags that differ from the config.
    Raises UserError if the file is not a sound checkpoint, is somebody else's, or does
    not fit today's code.
    """
    line = CommandLine(flags)
    if line.configs:
        return load_into(path, line)
    checkpoint = read_checkpoint(path)
    config = checkpoint["config"]
    if not trust and not is_own(path, line.place("trainer.default_root_dir")):
        raise UserError(
            f"{path} is not in your folder of runs; it names "
            f"{', '.join(classes_in(config)[:5])}",
            "give --config FILE, a YAML of yours; or --trust_checkpoint true, in "
            "Python trust=True, if you would run it as a program",
            2,
        )
    check_has_classes(config, path)
    # the devices of the run may not be here; what changes the result stays
    trainer = {}
    for key in ("precision", "limit_test_batches"):
        if key in config["trainer"]:
            trainer[key] = config["trainer"][key]
    if config["trainer"].get("accelerator") == "cpu":
        trainer["accelerator"] = "cpu"
    spec = saved_spec(config | {"trainer": trainer}, line, "checkpoint")
    leave_fold(spec)
    check_split(config, spec.config.data, path)
    model, data = build(spec)
    with state_errors(path):
        model.on_load_checkpoint(checkpoint)  # as Lightning does
        load_state(checkpoint, model, path)
        load_data_state(checkpoint, data)
    return spec, model, data


def load_into(path: Path, line: CommandLine) -> Loaded:
    """Return the model and the data that the user's YAML names, with the weights of any
    file."""
    content = read_weights(path)
    config: Any = None
    if isinstance(content, dict) and is_config(content.get("config")):
        config = content["config"]
    spec = new_spec(line)
    leave_fold(spec)
    if config:
        check_split(config, spec.config.data, path, has_state=False)
    model, data = build(spec)
    if isinstance(data, BaseDataModule):  # predictions need its classes and shapes
        state = content.get(type(data).__qualname__) if config else None
        if isinstance(state, dict):
            # until version 0.3 the test part followed from split_seed
            data.test_seed = int(state.get("test_seed", data.split_seed))
        data.prepare_data()
        data.setup("fit")
    load_weights(model, str(path), is_complete=True, content=content)
    return spec, model, data


def leave_fold(spec: RunSpec) -> None:
    """Let --data.num_folds null mean the test set of the data: there is no fold
    then."""
    data = spec.config.data.get("init_args", Namespace())
    if data.get("num_folds", 0) is None and data.get("fold") is not None:
        data.fold = None


def classes_in(config: Any, key: str = "") -> list[str]:
    """Return the class paths in a config. key: The key of `config`."""
    if key == "class_path":
        return [str(config)[:60]]
    if isinstance(config, list):
        config = dict(enumerate(config))
    names: list[str] = []
    if isinstance(config, dict):
        for name, value in config.items():
            names += classes_in(value, str(name))
    return [*dict.fromkeys(names)]


def check_has_classes(config: dict[str, Any], path: Path) -> None:
    """Raise UserError for a run of objects that Python has built: nothing tells how to
    build them again."""
    if not config.get("built_in_python"):
        return
    names = [config[part]["class_path"] for part in ("model", "data")]
    raise UserError(
        f"{path}: its {' and '.join(names)} were built in Python",
        "give the objects: lightbase.load(path, module, data)",
        2,
    )


def check_split(
    trained: dict[str, Any], data: Namespace, path: Path, has_state: bool = True
) -> None:
    """Raise UserError if other samples than in the training would be the ones for
    training, validation and test.

    trained: The config in a checkpoint.
    data: The config of the data now.
    has_state: Whether the data gets its state. Then it refuses to test a fold without
        the fold's number.
    """
    before = trained["data"].get("init_args", {})
    now = vars(data.get("init_args", Namespace()))
    for name in before.keys() & now.keys() & {*SPLIT_ARGUMENTS}:
        if name in ("num_folds", "fold") and now[name] is None and has_state:
            continue  # the data's own test set, which has no sample of a fold
        if now[name] != before[name]:
            run = relative_to_cwd(path)
            raise UserError(
                f"--data.{name} {now[name]}: the training of {run} had {before[name]}",
                "leave it as it was: a test may not have samples of the training",
                2,
            )


def load_data_state(checkpoint: dict[str, Any], data: LightningDataModule) -> None:
    """Let the data have the classes, the splits and the order that a run has saved."""
    state = checkpoint.get(type(data).__qualname__)
    if state is not None:
        data.load_state_dict(state)


def load_state(checkpoint: dict[str, Any], model: LightningModule, path: Path) -> None:
    """Load the weights. Raises UserError if they are weights of another network."""
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, TypeError) as error:
        config = flatten(checkpoint["config"]["model"], "model")
        reason = textwrap.shorten(str(error).splitlines()[-1], 300)
        raise UserError(
            f"checkpoint {path} is of another model: {reason}",
            f"it was trained with {config.get('model.net', config['model'])}",
        ) from error
