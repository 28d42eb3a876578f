"""Builds the data, the model and the Trainer that the record of a run describes.

Read `build` first, which makes the data and then the model: the model needs numbers
that only the data knows, such as the number of classes. `make_trainer` is called later,
when the folder, the callbacks and the loggers of the run exist.
"""

from pathlib import Path
from typing import Any
from urllib.error import URLError

import jsonargparse
from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightbase.config.errors import UserError, first_line, raised_at, say
from lightbase.config.parser import explain_mistake
from lightbase.config.spec import RunSpec, arguments, entries, validate
from lightbase.data.module import BaseDataModule
from lightbase.run.devices import settle_devices

BAREBONES = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "log_every_n_steps": 0,
    "num_sanity_val_steps": 0,
}
"""The Trainer's arguments with trainer.barebones, which measures Lightning alone."""


def build(spec: RunSpec) -> tuple[LightningModule, LightningDataModule]:
    """Return the model and the data of a run. The data is built but not loaded.

    For a new run, the facts of the data are added to `spec.config`. The callbacks and
    other objects of the Trainer's arguments are put into `spec.trainer`. The random
    generators are seeded with `seed_everything` first.

    Raises UserError if a setting does not fit its type, or an object cannot be built.
    """
    config = spec.config
    # the seed may not be null: for null, seed_everything would take the seed 0
    begin(spec, Namespace(seed_everything=config.seed_everything, data=config.data))
    data: LightningDataModule = instantiate(spec, Namespace(data=config.data)).data
    if not spec.is_saved:  # a saved config is complete, and its data may be missing
        fill_in(spec, facts_of(data))
    validate(spec, config)
    rest = config.clone()
    del rest["data"]
    model: LightningModule = build_rest(spec, rest).model
    if str(config.trainer.precision) in ("64", "64-true"):
        model.double()  # Lightning does it after it has read a checkpoint's weights
    return model, data


def begin(spec: RunSpec, needed: Namespace) -> None:
    """Prepare for building the first objects.

    Fill in the Trainer's flags that the user left open, in place: those of the devices,
    and with `barebones` those that Lightning refuses beside it. Seed the random
    generators.

    needed: The settings that are checked, with the seed among them.
    Raises UserError if one of them does not fit its type.
    """
    trainer = spec.config.trainer
    settle_devices(trainer)
    if trainer.barebones:
        trainer.update(Namespace(BAREBONES))
        say("trainer.barebones true: no loggers, no checkpoints and no progress bar")
    validate(spec, needed)
    seed_everything(spec.config.seed_everything, workers=True, verbose=False)


def build_rest(spec: RunSpec, config: Namespace) -> Namespace:
    """Return the objects of `config`, and keep the Trainer's arguments in
    `spec.trainer`. The loggers are left out, because they need the folder of the run.

    config: The settings without the data. `logger` is set to None in a copy of its
        `trainer`, so the settings of the run do not change.
    """
    config.trainer = config.trainer.clone()
    config.trainer.logger = None
    objects = instantiate(spec, config)
    spec.trainer = vars(objects.trainer)
    return objects


def instantiate(spec: RunSpec, config: Namespace) -> Namespace:
    """Return the objects that a part of the settings describes.

    config: A part of the settings, such as Namespace(data=...). The result has the same
        keys, and the objects as their values.
    Raises UserError if the settings are wrong: an argument is missing or has a wrong
    type, a package or file is missing, or the class itself raises a ValueError or
    similar. A failed download raises URLError, as it is. Any other error is a bug in
    the user's code, and is raised as it is, too.
    """
    failures: list[Exception] = []

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Return an object of a class, and keep the error if its __init__ fails."""
        try:
            return cls(*args, **kwargs)
        except Exception as error:  # jsonargparse turns it into a ValueError
            failures.append(error)
            raise

    instantiators: Any = [(construct, object, True)]
    try:
        return spec.parser.instantiate(config, instantiators=instantiators)
    except ValueError as error:
        # if no class has failed, a function may have: then its error is the cause
        failure: Any = error.__cause__ or error
        if failures:
            failure = failures[0]
        file, line = raised_at(failure)
        if file.parent == Path(jsonargparse.__file__).parent:  # a wrong setting
            reason = explain_mistake(str(error), spec.parser, config)
            raise UserError(reason, status=2) from error
        if isinstance(failure, URLError):  # a script prints that a download failed
            raise failure from None
        reason = first_line(failure)
        if isinstance(failure, ImportError | OSError):  # a package or a file
            raise UserError(
                f"what the config names is not there: {reason}"
            ) from failure
        mistakes = (ValueError, AssertionError, MisconfigurationException)
        if isinstance(failure, mistakes) and line.startswith("raise "):
            problem = f"the config does not fit: {reason}"
            raise UserError(problem, status=2) from failure
        raise failure from None  # a bug in the user's code


def facts_of(data: LightningDataModule) -> dict[str, Any]:
    """Return the facts that the data knows before it is loaded, by the names of the
    arguments that take them: num_classes, image_shape [C, H, W], and the number of
    channels, in_channels and in_chans. A fact that the data does not know is missing.
    """
    facts: dict[str, Any] = {}
    num_classes = getattr(data, "num_classes", None)
    if num_classes:
        facts["num_classes"] = int(num_classes)
    if isinstance(data, BaseDataModule) and data.image_shape:
        shape = [int(size) for size in data.image_shape]
        facts |= {"image_shape": shape, "in_channels": shape[0]}
        facts["in_chans"] = shape[0]  # the name that timm uses
    return facts


def fill_in(spec: RunSpec, facts: dict[str, Any]) -> None:
    """Add facts of the data to the settings, where the user has given no value.

    The model gets them, and each network, loss and metric among its arguments, if it
    has an argument of that name. Objects inside these keep their defaults.

    facts: {name of an argument: value}, see `facts_of`.
    """
    model = spec.config.model
    fill_class(spec, "model", model, facts)
    for name, value in arguments(model).items():
        fill_class(spec, f"model.{name}", value, facts)
        for inner_name, inner in entries(value).items():
            fill_class(spec, f"model.{name}.{inner_name}", inner, facts)


def fill_class(spec: RunSpec, key: str, node: Any, facts: dict[str, Any]) -> None:
    """Add facts to one {class_path: ..., init_args: {...}}, in place. Any other value
    is left as it is.

    key: The name of this setting, such as "model.net".
    """
    if "class_path" not in entries(node):
        return
    values = arguments(node)
    for name, fact in facts.items():
        if name in values and f"{key}.{name}" not in spec.given:
            values[name] = fact
    # these functions take the facts in **kwargs, where jsonargparse does not see them
    path = str(node["class_path"])  # `validate` refuses what is no text
    is_timm = path.startswith(("timm.models.", "timm.create_model"))
    if is_timm or path.endswith(".get_model"):
        names = ["num_classes"]
        if is_timm:
            names = ["in_chans", "num_classes"]
        taken = {}
        for name in names:
            if name in facts and name not in values:
                taken[name] = facts[name]
        node["dict_kwargs"] = taken | entries(node.get("dict_kwargs"))
    elif path.startswith("torchvision.models.") and "num_classes" in facts:
        values.setdefault("num_classes", facts["num_classes"])
