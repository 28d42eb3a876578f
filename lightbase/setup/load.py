"""A run rebuilt from its checkpoint, for evaluate.py, predict.py and export.py.

A checkpoint holds the config of its run, which names classes to import, so only a file
in the user's folder of runs is rebuilt. `load_into` is for other files.
"""

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule

from lightbase.config.errors import UserError
from lightbase.config.files import Values, relative_to_cwd
from lightbase.config.known_errors import noted
from lightbase.config.paths import PROJECT, is_own
from lightbase.config.spec import (
    CommandLine,
    RunSpec,
    arguments,
    entries,
    new_spec,
    read_spec,
)
from lightbase.config.yaml_files import REMOVED, flatten, renamed
from lightbase.data.module import SPLIT_ARGUMENTS, BaseDataModule
from lightbase.model.shards import load_shards
from lightbase.model.transfer import load_checked, load_weights, read_weights
from lightbase.run.state import note_on_state
from lightbase.setup.build import build

Loaded = tuple[RunSpec, LightningModule, LightningDataModule]
"""A run: its record, its model and its data."""

SAVED = {"state_dict", "config", "package", "lightbase"}
"""Keys of a run's checkpoint. Version 0.2 did not save "lightbase"."""


def read_checkpoint(path: Path) -> Values:
    """Return the content of a run's checkpoint, from version 0.3 on, with today's names
    of classes, as `load_checked` does. No code of the file is run."""
    checkpoint = load_checked(path)
    if not entries(checkpoint).keys() >= SAVED:
        raise UserError(
            f"{path} is not a checkpoint of a run: it lacks the weights, or the config "
            "that train.py saves from version 0.3 on"
        )
    checkpoint["config"].pop(REMOVED, None)
    checkpoint["config"] = renamed(checkpoint["config"], checkpoint["package"])
    return checkpoint  # type: ignore[no-any-return]


def load_run(path: Path, flags: Sequence[str] = (), trust: bool = False) -> Loaded:
    """Return the record of a run, its model with the weights of a checkpoint, and its
    data.

    Without --config in the flags, model and data are rebuilt from the config in the
    checkpoint. The file has to be the user's (see `is_own`), or `trust` is True:
    classes that it names are run. With --config, the user's YAML names the classes, and
    any file gives its weights only.

    flags: --config FILE, and settings that differ from the config, such as --data.*.
    """
    line = CommandLine(flags)
    if line.configs:
        return load_into(path, line)
    if not trust:
        way_out = (
            "give --config FILE, a YAML of yours; or --trust_checkpoint true, in "
            "Python trust=True, if you would run it as a program"
        )
        check_own(path, line.place("trainer.default_root_dir"), way_out)
    checkpoint = read_checkpoint(path)
    config = checkpoint["config"]
    check_has_classes(config)
    # This machine may have other devices than the run had: of the Trainer's flags, only
    # those that change the result are kept.
    kept = {"precision", "plugins", "limit_test_batches"}
    if config["trainer"].get("accelerator") == "cpu":
        kept.add("accelerator")
    trainer = {key: x for key, x in config["trainer"].items() if key in kept}
    config = config | {"trainer": trainer}
    spec = read_spec([config], line, PROJECT.default_model, is_complete=True)
    leave_fold(spec)
    check_split(config, spec.config.data, path)
    spec, model, data = build(spec)
    restore(checkpoint, model, data, path)
    return spec, model, data


def check_own(path: Path, root: str | None, way_out: str) -> None:
    """Raise UserError for an existing file that is not the user's, see `is_own`."""
    if path.exists() and not is_own(path, root):
        raise UserError(
            f"{path} is not in your folder of runs: no class that it names is built",
            way_out,
            2,
        )


def restore(
    checkpoint: Values,
    model: LightningModule,
    data: LightningDataModule,
    path: Path,
) -> None:
    """Give the model its weights, and the data its state."""
    checkpoint = load_shards(checkpoint, path)
    with noted(note_on_state(path)):
        model.on_load_checkpoint(checkpoint)  # as Lightning does
        load_state(checkpoint, model, path)
        load_data_state(checkpoint, data)


def load_into(path: Path, line: CommandLine) -> Loaded:
    """Return a run as `load_run` does, built from the user's YAML, with the weights of
    any file. It must have all weights of the model, and the data the same splits."""
    content = read_weights(path)
    saved = entries(content)
    spec = new_spec(line)
    leave_fold(spec)
    if saved.keys() >= SAVED:
        check_split(saved["config"], spec.config.data, path, has_state=False)
    spec, model, data = build(spec)
    if isinstance(data, BaseDataModule):  # predictions need its classes and shapes
        state = entries(saved.get(type(data).__qualname__))
        if state:
            # until version 0.3 the test part followed from split_seed
            test_seed = state.get("test_seed", data.split_seed)
            if isinstance(test_seed, int):
                data.test_seed = test_seed
            data.lists_parts = bool(state.get("lists_parts", True))
        data.prepare_data()
        data.setup("fit")
        # compared when the test set is loaded
        data.saved_fingerprints = entries(state.get("fingerprints"))
    load_weights(model, path, is_complete=True, content=content)
    return spec, model, data


def leave_fold(spec: RunSpec) -> None:
    """Remove the fold from the settings if --data.num_folds is null: a run of
    cross-validation is tested on the data's test set."""
    data = arguments(spec.config.data)
    if "data.num_folds" in spec.given and data["num_folds"] is None:
        data["fold"] = None


def check_has_classes(config: Values) -> None:
    """Raise UserError if the model and data of a run were given as Python objects, of
    which the config has the classes only."""
    if config.get("built_in_python"):
        raise UserError(
            "the model and the data of this run were built in Python",
            "give the objects: lightbase.load(path, module, data)",
            2,
        )


def check_split(
    trained: Values, data: Namespace, path: Path, has_state: bool = True
) -> None:
    """Raise UserError if the data would be split in another way than in the training. A
    test could then have samples of the training.

    trained, data: The config in a checkpoint, and that of the data now.
    has_state: Whether the data gets the state in the checkpoint. Then num_folds and
        fold may be null: the data's test set has no sample of the training.
    """
    # runs before version 0.4 have no val_split
    before = {"val_split": "random"} | arguments(trained["data"])
    now = arguments(data)
    for name in before.keys() & now.keys() & {*SPLIT_ARGUMENTS, "scale_targets"}:
        leaves_fold = name in ("num_folds", "fold") and now[name] is None and has_state
        if now[name] != before[name] and not leaves_fold:
            run = relative_to_cwd(path)
            raise UserError(
                f"--data.{name} {now[name]}: the training of {run} had {before[name]}",
                "leave it as it was: a test may not have samples of the training, or "
                "other units",
                2,
            )


def load_data_state(checkpoint: Values, data: LightningDataModule) -> None:
    """Restore the state that a run has saved for its data, if there is one."""
    state = checkpoint.get(type(data).__qualname__)
    if state is not None:
        data.load_state_dict(state)


def load_state(checkpoint: Values, model: LightningModule, path: Path) -> None:
    """Copy the weights of a run's checkpoint into the model."""
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, TypeError) as error:
        config = flatten(checkpoint["config"]["model"], "model")
        reason = str(error).splitlines()[-1].strip()[:300]
        raise UserError(
            f"checkpoint {path} is of another model: {reason}",
            f"it was trained with {config.get('model.net', config['model'])}",
        ) from error
