"""The parser of a run's settings, and what it says about a wrong one.

Read `make_parser` first, which adds the arguments. `explain_mistake` turns a message of
jsonargparse, an indented tree of up to fifty lines with an error for each type that an
argument allows, into one line. test_cli.py tests it with real commands.
"""

import contextlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    register_type,
    restricted_number_type,
)
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightbase.compat import arguments_of, change_yaml_loader, resolve_class_names
from lightbase.config.errors import (
    SEE_HELP,
    UserError,
    did_you_mean,
    imported,
    own_line,
    wrong_kind,
)
from lightbase.config.files import Values, as_table, as_text
from lightbase.config.yaml_files import (
    path_of_class,
    read_numbers_as_flags,
    users_classes,
)

# the range of NumPy's seeds
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])

CountOrAll = restricted_number_type("CountOrAll", int, (">=", -1))

FLAGS = [
    ("seed_everything", Seed, 42),
    ("print_config", bool, False),
    ("name", str | None, None),
    ("ckpt_path", str | None, None),
    ("trust_checkpoint", bool, False),
    ("monitor", str | None, "auto"),
    ("monitor_mode", Literal["min", "max"] | None, None),
    ("patience", PositiveInt | None, None),
    ("num_threads", PositiveInt | None, None),
    # auto: of earlier versions, as false
    ("cuda_graphs", bool | Literal["auto"], False),
    ("keep_every_epoch", bool, False),
    ("checkpoint_minutes", NonNegativeFloat, 10.0),
    ("test", bool, True),
    # the callbacks that only watch: see `make_callbacks` in lightbase/commands/train.py
    ("checks", bool, True),
    ("try_network", bool, True),  # of earlier versions: its false means checks false
    ("stop_on_nan", bool, True),
    ("device_monitor", bool, True),
    ("step_timer", bool | Literal["table"], True),
    ("figures_every_n_epochs", NonNegativeInt, 5),
]
"""Name, type and default of the flags of train.py that are not arguments of the
Trainer, the model or the data."""

TRAINER_DEFAULTS = {
    "trainer.max_epochs": 10,
    "trainer.log_every_n_steps": 100,
    "trainer.enable_model_summary": False,
    # the same as in Lightning: arguments in `TRAINER_TYPES` would have the default None
    "trainer.check_val_every_n_epoch": 1,
    "trainer.accumulate_grad_batches": 1,
}
"""Defaults of the Trainer's arguments that the parser would not have by itself."""

TRAINER_TYPES = {
    # Lightning wrote int | float, which typing may hold as float | int: 1, one batch,
    # would be read as 1.0, all batches
    "limit_train_batches": int | float | None,
    "limit_val_batches": int | float | None,
    "limit_test_batches": int | float | None,
    "limit_predict_batches": int | float | None,
    "val_check_interval": int | float | str | None,
    # Lightning accepts numbers below zero here
    "min_epochs": NonNegativeInt | None,
    "min_steps": NonNegativeInt | None,
    "max_time": dict[str, NonNegativeInt] | str | None,
    "log_every_n_steps": NonNegativeInt | None,
    "num_sanity_val_steps": CountOrAll | None,
    "check_val_every_n_epoch": PositiveInt | None,
    "accumulate_grad_batches": PositiveInt,
    "gradient_clip_val": NonNegativeFloat | None,
    "default_root_dir": Path | None,
}

# null in config.yaml unless given: `make_logger` in lightbase/watch/loggers.py fills
# them in when the run has a folder
LOGGER_TYPES = {
    "save_dir": Path | None,
    "name": str | None,
    "experiment_name": str | None,
    "default_hp_metric": bool | None,
}

REPLACED_TYPES = {
    Trainer: TRAINER_TYPES,
    Logger: LOGGER_TYPES,
    # "l1_unstructured" cannot be dumped as Lightning's Callable | str
    ModelPruning: {"pruning_fn": str},
}
"""{class or base class: {argument: type in place of the declared one}}"""


def absolute(text: str) -> Path:
    """Return an absolute path, so that a saved config means the same in any working
    folder."""
    if not text:
        raise ValueError("no path is given")
    return Path(text).absolute()


def as_tensor(values: Any) -> Tensor:
    """Return a list of numbers, or nested lists of one length, as a tensor, for an
    argument such as the class weights of a loss."""
    if not isinstance(values, list):
        raise ValueError("give a list of numbers, such as [1,1,5]")
    return torch.tensor(values, dtype=torch.float32)


class Parser(LightningArgumentParser):
    """LightningArgumentParser with errors of two lines, and with the types of
    `REPLACED_TYPES`.

    A bare class name of the user's package, such as MLP, counts as its import path.
    jsonargparse also makes parsers of this class, for a class inside the settings.

    parsed: The settings that are parsed so far. The message about an unknown flag
        proposes arguments of the classes that they name.
    """

    def __init__(self, **options: Any) -> None:
        register_type(Path, str, absolute, fail_already_registered=False)
        register_type(Tensor, Tensor.tolist, as_tensor, fail_already_registered=False)
        resolve_class_names(path_of_class)
        change_yaml_loader(read_numbers_as_flags)
        options |= {
            "allow_abbrev": False,
            "print_config": None,
            "usage": "python scripts/train.py [--KEY VALUE] ...",
        }
        super().__init__(**options)
        self.parsed = Namespace()

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, **options: Any
    ) -> list[str]:
        """Add the arguments of a class, and return their names. jsonargparse calls this
        for the Trainer and for each class in the settings, such as a logger.

        nested_key: The name before each argument, such as "trainer"; None for no name.
        """
        types: Values = {}
        for base, replaced in REPLACED_TYPES.items():
            if issubclass(class_type, base):
                types = replaced
        names = sorted(types.keys() & inspect.signature(class_type).parameters.keys())
        options["skip"] = {*(options.get("skip") or ()), *names}
        added = super().add_class_arguments(class_type, nested_key, **options)
        for name in names:
            key = f"{nested_key}.{name}".removeprefix("None.")
            self.add_argument(f"--{key}", type=types[name], default=None)
            added.append(key)
        return added

    def format_help(self, *_: Any) -> str:
        """Return a line for each argument, for --model.help CLASS: its flag, its
        default and the beginning of its description. jsonargparse would list hundreds
        of classes for a network or a metric."""
        rows = []
        for action in arguments_of(self):
            if not action.dest.endswith("help"):
                text = textwrap.shorten(action.help or "", 70)
                default = as_text(action.default)[:12]
                rows.append((action.option_strings[0], default, text))
        if not rows:
            return "a class with arguments is needed, as in --model.help CLASS\n"
        return "\n".join(as_table(rows)) + "\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UserError with one line for a mistake, and the way to the help, or the
        line of the user's file whose import has failed.

        ex: The exception that has this message, or None.
        """
        if not self.exit_on_error:  # the outer parser reports it
            super().error(message, ex)
        problem = explain_mistake(message, self, self.parsed)
        raise UserError(problem, own_line(ex) or SEE_HELP, 2) from ex


def make_parser(default_model: str | None, builds_data: bool = True) -> Parser:
    """Return a parser of all settings of a run.

    The names of the settings are flags, such as --trainer.max_epochs, and keys of a
    config file. The flag of a bool may stand alone: it means true. The parser has no
    default for `data`; `read_spec` in spec.py reports its absence.

    default_model: The import path of the model's class if no setting names one. None:
        the model is a Python object, and the parser takes a dict for it.
    builds_data: Whether the data is built from settings. If not, it is an object, too.
    """
    parser = Parser()
    for name, kind, default in FLAGS:
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.set_defaults(TRAINER_DEFAULTS)
    if default_model is None:
        parser.add_argument("--model", type=dict)
        parser.add_argument("--built_in_python", type=bool, default=True)
    else:
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        parser.set_defaults({"model": {"class_path": default_model}})
    if builds_data:
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    else:
        parser.add_argument("--data", type=dict)
    for action in arguments_of(parser):
        if isinstance(action.default, bool):  # --trainer.fast_dev_run alone
            action.nargs = "?"
            action.const = True
    return parser


def parser_of(class_path: str) -> ArgumentParser:
    """Return a parser of the arguments of a class or function, with their defaults."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    module, _, name = class_path.rpartition(".")
    # the colon: torchvision.models.alexnet is a function and a module
    class_or_function = pkgutil.resolve_name(f"{module}:{name}")
    if inspect.isclass(class_or_function):
        parser.add_class_arguments(class_or_function, fail_untyped=False)
    else:
        parser.add_function_arguments(class_or_function, fail_untyped=False)
    return parser


SYNONYMS = {
    "amp": "trainer.precision",
    "arch": "model.net",
    "bs": "data.batch_size",
    "checkpoint": "ckpt_path",
    "cpu": "trainer.accelerator cpu",
    "cuda": "trainer.accelerator gpu",
    "dataset": "data",
    "device": "trainer.accelerator",
    "learning_rate": "model.lr",
    "epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "log_dir": "trainer.default_root_dir",
    "output_dir": "trainer.default_root_dir",
    "resume": "ckpt_path",
    "seed": "seed_everything",
    "momentum": "model.optimizer_args.momentum",
    "wd": "model.optimizer_args.weight_decay",
    "weight_decay": "model.optimizer_args.weight_decay",
}
"""{word that is typed instead: the setting that has this meaning here}"""

NOISE = (
    "Parser key",
    "Problem with given class_path",
    "Expected a <class 'NoneType'>",
    "Expected a path",
    "Given value",
)
"""Beginnings of lines that do not give a reason: the place, two types of a union that
are seldom meant, and the value, which `explain_mistake` reads separately."""

BESIDE = (
    "beside class_path there is only init_args, with all arguments of the class; the "
    "indentation decides what stands beside it"
)

HINTS = {
    "class_path": BESIDE,
    "_target_": "write class_path in place of it, and init_args with the arguments; "
    "trainer has neither",
    "defaults": "configs are not composed here; give --config several times",
    "fit": "leave fit out, as a word and as a section",
}
"""{key that is not accepted: what to do}. Hydra has _target_ and defaults, LightningCLI
has fit."""

EXAMPLES = {
    "callbacks": "lightning.pytorch.callbacks.EarlyStopping",
    "criterion": "torch.nn.CrossEntropyLoss",
    "data": "lightbase.ImageFolder",
    "logger": "lightning.pytorch.loggers.CSVLogger",
    "net": "torchvision.models.resnet18",
}
"""{last word of a setting: import path that shows what it takes}"""

BASE_ARGUMENTS = (
    "; a class has the arguments of its base class only if its __init__ takes **kwargs "
    "and calls super().__init__(**kwargs)"
)


GIVEN = r"Given value: (?!Namespace)(?:NestedArg\(.*val=)?'?(.{0,60}?)'?\)?$"
"""The line of a message that has the wrong value."""


COLLECTION = r"\n +- Problem with given class_path '\S+MetricCollection':\n +Option.*"
"""Lines about metrics by name: jsonargparse tries their names as arguments of a
MetricCollection, too."""


def explain_mistake(message: str, parser: ArgumentParser, config: Namespace) -> str:
    """Return one line for an error of jsonargparse: "key: value: reason", at most 400
    characters, with a proposal if a similar name exists.

    parser: It has raised the error. Its keys are proposed.
    config: What was parsed before. The arguments of its classes are proposed, too.
    """
    if message.lower().startswith("unrecognized arguments: "):
        # "" is a variable of a shell that is not set
        word = message.split(" ")[2].partition("=")[0]
        if not word.startswith("-"):
            hint = HINTS.get(word, "a config file needs --config")
            return f"unknown argument {word!r}; {hint}"
        classes = {
            "data": config.get("data.class_path"),
            "model.net": config.get("model.init_args.net.class_path"),
            "model": config.get("model.class_path"),
        }
        return f"unknown argument {word}{proposal(word, parser, classes)}"
    message = re.sub(COLLECTION, "", message)
    key, class_path, reason = deepest_reason(message)
    given = re.search(GIVEN, message, re.MULTILINE)
    value = given[1] if given else ""
    if wrong_path := explain_path(message, key, value or class_path):
        return wrong_path
    pattern = r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*"
    if option := re.fullmatch(pattern, reason):
        unknown = ".".join(filter(None, [key, *option.groups()]))
        for word in HINTS.keys() & unknown.split("."):
            return f"{unknown}: {HINTS[word]}"
        near = proposal(unknown, parser, {key: class_path})
        return f"unknown key {unknown}{near or BASE_ARGUMENTS * bool(class_path)}"
    reason = in_plain_words(reason, class_path, key)
    if reason == BESIDE and "Got value: None" in message:
        return f"{key}: there is no class; give --{key} CLASS"
    if key.endswith("optimizer.params"):  # which only the module can give
        return (
            f"{key}: annotate the optimizer as lightning.pytorch.cli.OptimizerCallable"
        )
    if value and "Got value" not in reason:
        reason = f"{value!r}: {reason}"
    if key:
        reason = f"{key}: {reason}"
    return reason[:400]


def in_plain_words(reason: str, class_path: str, key: str = "") -> str:
    """Return a reason of jsonargparse in words that users know, those of YAML, with a
    proposal if there is one.

    class_path, key: The class that the error is about, or "", and the setting.
    """
    if reason.startswith(("module ", "No module named ")):
        reason += did_you_mean(class_path, users_classes())
    reason = re.sub(r"a <class '([\w.]+)'>", r"\1", reason)
    reason = re.sub(r"^a class path \(str\).*", BESIDE, reason)
    reason = reason.replace("'NoneType'", "null").replace("a typing.Literal", "one of ")
    reason = reason.replace("Got value: None", "There is no value")
    pattern = r"Expected list. Got value: ([^\[\]{}]+,[^\[\]{}]+)"
    if listed := re.fullmatch(pattern, reason):
        reason += f"; a list has brackets: [{listed[1]}]"
    return reason


def explain_path(message: str, key: str, path: str) -> str:
    """Return one line if the error of jsonargparse is about an import path, or "".

    key, path: The setting, and its value.
    """
    if text := re.search(r"dot import path string: (\S+)", message):
        example = EXAMPLES.get(key.rpartition(".")[2], "package.module.NAME")
        paths = {path.rpartition(".")[2]: path for path in users_classes()}
        near = did_you_mean(text[1], paths)
        return f"{key}: {text[1]!r}: not an import path, such as {example}{near}"
    if needed := re.findall(r"does not correspond to a subclass of (\w+)", message):
        with contextlib.suppress(UserError):  # the message is about another value
            found = imported(key, path)
            return wrong_kind(key, path, found, " or ".join(dict.fromkeys(needed)))
    return ""


def proposal(name: str, parser: ArgumentParser, classes: dict[str, str | None]) -> str:
    """Return a proposal such as `; did you mean --model.lr?` for a setting that does
    not exist, or "" if none is similar. Only the last words are compared, so that --lr
    and --learning_rate find --model.lr.

    name: The name as it was typed, with or without dashes.
    parser, classes: The keys of the parser are proposed, and the arguments of the
        classes, {setting: import path}. The last class is the likeliest.
    """
    names = [action.dest for action in arguments_of(parser)]
    for key, class_path in classes.items():
        if class_path:
            arguments = parser_of(class_path).get_defaults().keys()
            names += [f"{key}.{argument}" for argument in arguments]
    typed = name.lstrip("-")
    # a foreign class may lack the setting that a synonym stands for
    synonyms = {word: key for word, key in SYNONYMS.items() if key != typed}
    by_word = synonyms | {name.rpartition(".")[2]: name for name in names}
    dashes = ""
    if name.startswith("-"):
        dashes = "--"
    return did_you_mean(typed.rpartition(".")[2], by_word, dashes)


def deepest_reason(message: str) -> tuple[str, str, str]:
    """Return the key, the class path at this key, and the error itself, each "" if the
    message does not have it. A message is an indented tree, and the most indented error
    is closest to the wrong value. Errors with the same indent belong to the types of a
    union, and are joined with "or"."""
    keys = re.findall(r'Parser key "(.+?)":', message)
    class_paths = re.findall(r"Problem with given class_path '(.+)':", message)
    reasons = {0: [""]}
    for line in message.splitlines():
        text = line.strip(" -")
        if text and not text.startswith(NOISE):
            indent = len(line) - len(line.lstrip(" -"))
            reasons.setdefault(indent + 1, []).append(text)
    reason = " or ".join(dict.fromkeys(reasons[max(reasons)]))
    reason = reason.replace(" or Expected ", " or ")
    return ".".join(dict.fromkeys(keys)), "".join(class_paths[-1:]), reason
