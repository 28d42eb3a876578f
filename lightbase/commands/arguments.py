"""The arguments of the scripts, checked before torch is imported, which takes
seconds."""

import argparse
import ast
import functools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NoReturn

from jsonargparse.typing import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

from lightbase.core.command_line import (
    CommandLine,
    config_files,
    path_of_class,
    read_config,
    users_classes,
)
from lightbase.core.errors import UserError, did_you_mean, say_once
from lightbase.core.folder import PROJECT, flatten, short, versions

Seed = restricted_number_type(
    "Seed", int, [(">=", 0), ("<", 2**32)]
)  # the range of NumPy's seeds
NumThreads = restricted_number_type(
    "NumThreads", int, [(">", 0), ("<=", 1024)]
)  # 100000 crash
FLAGS: list[tuple[str, Any, Any]] = [
    ("name", str | None, None),
    ("ckpt_path", str | None, None),
    ("trust_checkpoint", bool, False),
    ("monitor", str | None, "auto"),
    ("monitor_mode", Literal["min", "max"] | None, None),
    ("patience", PositiveInt | None, None),
    ("steps_per_execution", PositiveInt, 1),
    ("try_network", bool, True),
    ("stop_on_nan", bool, True),
    ("num_threads", NumThreads | None, None),
    ("device_monitor", bool, True),
    ("step_timer", bool, True),
    ("figures_every_n_epochs", NonNegativeInt, 5),
    ("keep_every_epoch", bool, False),
]
"""Name, type and default of the flags of train.py that are not Lightning's, see
help/train.txt."""
TRAINER_DEFAULTS = {
    "max_epochs": 10,
    "log_every_n_steps": 100,
    "enable_model_summary": False,
}
TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
SYNONYMS = {  # words of other tools, and the last words of the flags that are meant
    "learning_rate": "lr",
    "epochs": "max_epochs",
    "num_epochs": "max_epochs",
    "workers": "num_workers",
    "gpus": "devices",
    "resume": "ckpt_path",
    "seed": "seed_everything",
}
OF_OPTIMIZER = [
    "--model.optimizer_args.momentum",
    "--model.optimizer_args.weight_decay",
]
GROUPS = ("model", "data", "trainer")
OF_CLASS = ("class_path", "init_args", "dict_kwargs", "help")
parsed = functools.cache(lambda file, changed: ast.parse(file.read_bytes()))
ALL_FLAGS = ("-",)
CONFIG_FLAGS = (
    "--config",
    "--data.",
    "--trainer.",
)  # of scripts that open a checkpoint
SEE_HELP = "see --help, or --print_config for every argument"


def first_look(script: str, args: Sequence[str]) -> None:
    """Answer --help and mistakes in the names of flags. script: its name, such as
    "train"."""
    _, flags = PARSERS[script]().read(args) if script in PARSERS else (None, [*args])
    if script in ("train", "tune", "sweep"):
        read_command(flags)


def read_command(args: Sequence[str]) -> CommandLine:
    """The command line of train.py, or its help. Raise UserError for a flag that there
    is not. What the source of a class does not tell, jsonargparse checks later."""
    line = CommandLine(args)
    classes = classes_of(line)
    groups = {group: arguments_in_source(path) for group, path in classes.items()}
    if any(flag in ("-h", "--help") for flag, _ in line.flags):
        print(help_of_train())
        raise SystemExit(0)
    top = [*(name for name, *_ in FLAGS), "seed_everything", "print_config", *GROUPS]
    keys = [
        f"{group}.{name}" for group in groups for name in sorted(groups[group] or ())
    ]
    flags = [f"--{key}" for key in (*reversed(keys), "config", *top)]  # the last wins
    if line.value("ckpt_path"):
        groups = {"trainer": groups["trainer"]}  # the classes are in the checkpoint
    for flag, _ in line.flags:
        if not flag.startswith("-"):
            near = did_you_mean(flag, config_files(Path()), "--config ")
            raise UserError(f"unknown argument {flag!r}{near}", SEE_HELP, 2)
        group, _, rest = flag.removeprefix("--").partition(".")
        name = rest.removeprefix("init_args.").partition(".")[0].rstrip("+")
        names = groups.get(group)
        is_there = group in GROUPS if rest else group.rstrip("+") in top
        if not is_there or (
            rest and names is not None and name not in (*names, *OF_CLASS)
        ):
            raise UserError(f"unknown argument {flag}{meant(flag, flags)}", SEE_HELP, 2)
    helps = {f"--{group}.help": path for group, path in classes.items()}
    line.flags = [
        (flag, helps.get(flag) if value is None else value)
        for flag, value in line.flags
    ]
    return line


def meant(flag: str, flags: Iterable[str]) -> str:
    """`; did you mean --model.lr?` for --lr, --learning_rate or --modle.lr; empty if
    none of the flags is similar."""
    by_word = {
        name.lstrip("-").rpartition(".")[2]: name for name in (*OF_OPTIMIZER, *flags)
    }
    by_word |= {
        word: by_word[name] for word, name in SYNONYMS.items() if name in by_word
    }
    return did_you_mean(flag.lstrip("-").rpartition(".")[2], by_word) or did_you_mean(
        flag, flags
    )


def classes_of(line: CommandLine) -> dict[str, str]:
    """The import paths of the classes whose arguments a command sets, by the flags of
    these."""
    settings: dict[str, Any] = {"model": PROJECT.default_model}
    if not line.names_experiment and PROJECT.default_config:
        settings |= flatten(read_config(PROJECT.default_config))
    for content in line.configs.values():
        settings |= flatten(content)
    settings |= {
        flag.removeprefix("--").removesuffix(".class_path"): x for flag, x in line.flags
    }
    settings |= {"model": line.model or settings["model"], "trainer": TRAINER}
    names = ("model", "model.net", "data", "trainer")
    return {name: path_of_class(str(settings.get(name))) for name in names}


def arguments_in_source(path: str) -> set[str] | None:
    """The arguments of a class, read from its source without importing it. None where
    the source
    does not tell them: it is no class, or does not only pass its **kwargs to its
        base."""
    module, _, name = path.rpartition(".")
    try:
        file = source_file(module)
        tree = parsed(file, file.stat().st_mtime)
    except (
        OSError,
        SyntaxError,
        ValueError,
    ):  # the import of the class will show what is wrong
        return None
    for node in tree.body:
        if (
            isinstance(node, ast.ClassDef)
            and node.name == name
            and not node.decorator_list
        ):
            bases = [ast.unparse(x) for x in node.bases]
            base = f"{module}.{bases[0]}" if len(bases) == 1 and bases != [name] else ""
            inits = [x for x in node.body if getattr(x, "name", "") == "__init__"]
            return arguments_of(inits[-1], base) if inits else arguments_in_source(base)
    imports = [
        x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and not x.level
    ]
    paths = {
        y.asname or y.name: f"{x.module}.{y.name}" for x in imports for y in x.names
    }
    return arguments_in_source(paths[name]) if name in paths else None


def arguments_of(init: Any, base: str) -> set[str] | None:
    """See `arguments_in_source`. base: the class that gets the **kwargs."""
    taken = [*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs]
    names = {argument.arg for argument in taken[1:]}  # without self
    if init.args.kwarg is None:
        return names
    code, kwargs = (
        ast.unparse(init),
        init.args.kwarg.arg,
    )  # each call is a line of this code
    is_for_base = re.search(rf"super\(\)\.__init__\(.*\*\*{kwargs}\b", code)
    is_used_again = len(re.findall(rf"\b{kwargs}\b", code)) > 2
    inherited = arguments_in_source(base) if is_for_base and not is_used_again else None
    return None if inherited is None else names | inherited


def source_file(module: str) -> Path:
    """The file of a module, which may be missing. Raises OSError."""
    package, *parts = module.split(".")
    folders = [str(Path.cwd()), str(PROJECT.root), *sys.path]
    spec = PathFinder.find_spec(package, folders)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(package)
    file = Path(spec.origin)
    stem = file.parent.joinpath(*parts)
    files = [stem.with_suffix(".py"), stem / "__init__.py"] if parts else [file]
    return next(filter(Path.is_file, files), files[0])


def help_text(script: str) -> str:
    return (
        Path(__file__)
        .with_name("help")
        .joinpath(f"{script}.txt")
        .read_text("utf-8")
        .rstrip()
    )


def help_of_train() -> str:
    """help/train.txt with the YAMLs and classes of the project."""
    classes = users_classes()
    names = {
        "configs": [*config_files(PROJECT.configs)],
        "networks": [path for path, base in classes if base.endswith("nn.Module")],
        "data": [path for path, base in classes if base.endswith("DataModule")],
        "models": [
            path for path, base in classes if base in ("BaseModule", "LightningModule")
        ],
    }
    indent = " " * 30
    columns = {
        kind: textwrap.fill(
            ", ".join(words), 80, initial_indent=indent, subsequent_indent=indent
        )
        for kind, words in names.items()
    }
    texts = {kind: text.strip() for kind, text in columns.items()}
    texts["default"] = "Give --config FILE, or --model CLASS and --data CLASS."
    if PROJECT.default_config:
        texts["default"] = "Without flags the experiment is\nconfigs/default.yaml."
    return help_text("train").format(**texts)


class ScriptParser(argparse.ArgumentParser):
    """Of the script `name`: without abbreviations, with mistakes as UserError.

    passes_on: How flags begin that are those of train.py; ALL_FLAGS: it has all others.
    """

    def __init__(self, name: str, passes_on: tuple[str, ...] = ()) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        text = help_text(name)
        super().__init__(
            description=text, allow_abbrev=False, formatter_class=formatter
        )
        self.passes_on = passes_on

    def read(self, args: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the arguments that are passed on."""
        args = sys.argv[1:] if args is None else args
        if self.passes_on == ALL_FLAGS:
            return self.parse_known_args(args)
        args, passed_on = split(args, self.passes_on)
        options, unknown = self.parse_known_args(args)
        if unknown:
            self.error(f"unknown argument {unknown[0]}")
        if "ckpt_path" in options:
            root = CommandLine(passed_on).value("trainer.default_root_dir")
            options.ckpt_path = checkpoint_file(options.ckpt_path, root)
            options.trust = options.trust_checkpoint == "true"
        return options, passed_on

    def add_checkpoint_arguments(self) -> None:
        path = "a checkpoint, a run's NAME or NAME/version_N, or last or best of the newest run"
        self.add_argument("--ckpt_path", required=True, help=path)
        trust: Any = {"nargs": "?", "const": "true", "default": "false"}
        trust |= {"choices": ("true", "false"), "help": "build whatever the file names"}
        self.add_argument("--trust_checkpoint", **trust)
        text = "a YAML of yours: the file gives its weights only"
        self.add_argument("--config", metavar="FILE", help=text)  # passed on

    def error(self, message: str) -> NoReturn:
        raise UserError(message, "see --help", 2)


def split(
    args: Sequence[str], beginnings: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """All other arguments, and the flags that begin so, with their values: argparse
    would take a value for a file."""
    others: list[str] = []
    flags: list[str] = []
    is_value = False  # of the flag before
    for arg in args:
        if arg.startswith(beginnings):
            flags.append(arg)
            is_value = "=" not in arg
        else:
            (flags if is_value and not arg.startswith("--") else others).append(arg)
            is_value = False
    return others, flags


def checkpoint_file(text: str, root: str | None = None) -> Path:
    """A file; `last` or `best` of the newest run of all; best.ckpt of a run's folder,
    of NAME/version_N, or of the newest run of NAME. Raises UserError.

    root: The folder of runs; logs/ unless given.
    """
    path, logs = Path(text), Path(root) if root else PROJECT.logs
    if text in ("last", "best"):
        path = max(
            logs.rglob(f"checkpoints/{text}.ckpt"), key=os.path.getmtime, default=path
        )
    elif not path.exists() or path.is_dir():
        folder = logs / text if (logs / text).is_dir() else path
        path = [folder, *versions(folder).values()][-1] / "checkpoints" / "best.ckpt"
    if not path.exists():
        names = (
            [] if (logs / text).exists() else [folder.name for folder in logs.glob("*")]
        )
        what = (
            f"no such file, nor a run with this checkpoint{did_you_mean(text, names)}"
        )
        way_out = "python scripts/runs.py lists the runs; --best NAME the best of them"
        raise UserError(f"--ckpt_path {text}: {what}", way_out)
    if path != Path(text):
        say_once(f"Checkpoint: {short(path)}")
    return path


def output_file(text: str) -> Path:
    """For add_argument(type=...): a path whose folder is there."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is a folder, or in none that is there"
        )
    return Path(text)


def evaluate() -> ScriptParser:
    parser = ScriptParser("evaluate", CONFIG_FLAGS)
    parser.add_checkpoint_arguments()
    text = "tables of the classes, as CSV too"
    parser.add_argument("--report", nargs="?", const="", metavar="FOLDER", help=text)
    return parser


def predict() -> ScriptParser:
    parser = ScriptParser("predict", CONFIG_FLAGS)
    parser.add_checkpoint_arguments()
    add = parser.add_argument
    add(
        "--split",
        choices=["train", "val", "test"],
        default="test",
        help="the set without files",
    )
    add("--output", type=Path, help="FILE.csv, FILE.npz, or a folder for masks")
    add("--top_k", type=int, metavar="K", default=1, help="the K likeliest classes")
    add("--probabilities", action="store_true", help="a column for each class")
    add("--threshold", type=float, default=0.5, help="of a label's probability")
    add("files", type=Path, nargs="*", help="files, or folders of images")
    return parser


def export() -> ScriptParser:
    parser = ScriptParser("export", CONFIG_FLAGS)
    parser.add_checkpoint_arguments()
    parser.add_argument("--format", choices=["onnx", "pt2", "pth"], default="pth")
    text = "the file; beside the checkpoint unless given"
    parser.add_argument("--output", type=output_file, help=text)
    return parser


def tune() -> ScriptParser:
    parser = ScriptParser("tune", ALL_FLAGS)
    both = ["batch_size", "lr"]
    add = parser.add_argument
    add("--find", nargs="+", choices=both, default=both, help="what to search")
    add(
        "--max_batch_size",
        type=PositiveInt,
        help="default: 1024 on a CPU, 8192 on a GPU",
    )
    add("--min_lr", type=PositiveFloat, default=1e-5, help="the first learning rate")
    add("--max_lr", type=PositiveFloat, default=1.0, help="the last learning rate")
    add("--num_steps", type=PositiveInt, default=500, help="steps from first to last")
    return parser


def sweep() -> ScriptParser:
    parser = ScriptParser("sweep", ALL_FLAGS)
    add = parser.add_argument
    add(
        "--search",
        action="append",
        required=True,
        metavar="FLAG=VALUES",
        help="repeatable",
    )
    add("--trials", type=PositiveInt, help="how many; of a grid at most so many")
    add(
        "--name",
        help="the sweep is in ROOT/NAME; the config's name and _sweep unless given",
    )
    add(
        "--num_workers",
        type=PositiveInt,
        default=1,
        help="processes that share the trials",
    )
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def benchmark() -> ScriptParser:
    parser = ScriptParser("benchmark")
    add = parser.add_argument
    add("--parts", nargs="+", choices=["mnist", "cifar"], default=["mnist", "cifar"])
    add("--rounds", type=int, default=3, help="turns of each contestant")
    add("--steps", type=int, default=400, help="of each contestant, in a round")
    return parser


PARSERS: dict[str, Callable[[], ScriptParser]] = {
    function.__name__: function
    for function in (evaluate, predict, export, tune, sweep, benchmark)
}
"""By the names of the scripts whose import takes seconds."""
