"""Builds the data, the model and the Trainer's arguments of a run, the data first: the
model needs numbers that only it knows, such as the number of classes.
"""

import copy
from dataclasses import replace
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule, seed_everything

from lightbase.config.errors import UserError, first_line, own_line
from lightbase.config.files import Values
from lightbase.config.spec import RunSpec, arguments, entries, validate
from lightbase.data.module import BaseDataModule
from lightbase.run.devices import settle_devices


def build(spec: RunSpec) -> tuple[RunSpec, LightningModule, LightningDataModule]:
    """Return the complete record of a run, its model and its data, which is not loaded.

    The config of the new record has the flags that `begin` fills in and, for a new run,
    the facts of the data. Its `trainer` has callbacks as objects. The loggers are left
    out: they need the folder of the run.
    """
    spec = replace(spec, config=copy.deepcopy(spec.config))
    config = spec.config
    # the seed may not be null: for null, seed_everything would take the seed 0
    begin(spec, Namespace(seed_everything=config.seed_everything, data=config.data))
    data: LightningDataModule = instantiate(spec, Namespace(data=config.data)).data
    if not spec.is_complete:  # a saved config is complete, and its data may be missing
        fill_in(spec, facts_of(data))
    validate(spec, config)
    settings = config.clone()
    del settings["data"]
    settings.trainer.logger = None
    objects = instantiate(spec, settings)
    spec.trainer = vars(objects.trainer)
    model: LightningModule = objects.model
    if str(config.trainer.precision) in ("64", "64-true"):
        model.double()  # Lightning does it after it has read a checkpoint's weights
    return spec, model, data


def begin(spec: RunSpec, needed: Namespace) -> None:
    """Seed the random generators, and fill in the flags of devices that the user left
    open, in place.

    needed: The settings that are checked.
    """
    settle_devices(spec.config.trainer)
    validate(spec, needed)
    seed_everything(spec.config.seed_everything, workers=True, verbose=False)


def instantiate(spec: RunSpec, config: Namespace) -> Namespace:
    """Return the objects that a part of the settings, such as Namespace(data=...),
    describes. A wrong setting, and a ValueError of a class, which is about its
    arguments, become a UserError. Another error gets a note that names the class."""
    failures: list[Exception] = []

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls(*args, **kwargs)
        except Exception as error:  # jsonargparse turns it into a ValueError
            error.add_note(f"while {cls.__name__} was built from the config")
            failures.append(error)
            raise

    instantiators: Any = [(construct, object, True)]
    try:
        return spec.parser.instantiate(config, instantiators=instantiators)
    except ValueError as error:
        failure: Any = error.__cause__ or error  # a function may have failed
        if failures:
            failure = failures[0]
        place = own_line(failure)
        if failures and isinstance(failure, ValueError):
            way_out = place or failure.__notes__[0]
            raise UserError(first_line(failure), way_out, 2) from failure
        if failures or place or isinstance(failure, OSError):
            raise failure from None
        spec.parser.error(str(error), error)


def facts_of(data: LightningDataModule) -> Values:
    """Return what the data knows before it is loaded, by the names of the arguments
    that take it: num_classes, image_shape [C, H, W], and the number of channels,
    in_channels and, for timm, in_chans."""
    facts: Values = {}
    num_classes = getattr(data, "num_classes", None)
    if num_classes:
        facts["num_classes"] = int(num_classes)
    if isinstance(data, BaseDataModule) and data.image_shape:
        shape = [int(size) for size in data.image_shape]
        facts |= dict.fromkeys(("in_channels", "in_chans"), shape[0])
        facts["image_shape"] = shape
    return facts


def fill_in(spec: RunSpec, facts: Values) -> None:
    """Add facts of the data to the settings of the model, and of each network, loss and
    metric among its arguments, where the user has given no value."""
    model = spec.config.model
    fill_class(spec, "model", model, facts)
    for name, value in arguments(model).items():
        fill_class(spec, f"model.{name}", value, facts)
        for inner_name, inner in entries(value).items():
            fill_class(spec, f"model.{name}.{inner_name}", inner, facts)


def fill_class(spec: RunSpec, key: str, node: Any, facts: Values) -> None:
    """Add facts to one {class_path: ..., init_args: {...}}, in place.

    key: The name of this setting, such as "model.net".
    """
    if "class_path" not in entries(node):
        return
    values = arguments(node)
    for name, fact in facts.items():
        if name in values and f"{key}.{name}" not in spec.given:
            values[name] = fact
    # these functions take the facts in **kwargs, where jsonargparse does not see them
    path = str(node["class_path"])  # `validate` refuses other types
    is_timm = path.startswith(("timm.models.", "timm.create_model"))
    if is_timm or path.endswith(".get_model"):
        names = {"num_classes"}
        if is_timm:
            names.add("in_chans")
        taken = {x: facts[x] for x in facts if x in names and x not in values}
        node["dict_kwargs"] = taken | entries(node.get("dict_kwargs"))
    elif path.startswith("torchvision.models.") and "num_classes" in facts:
        values.setdefault("num_classes", facts["num_classes"])
