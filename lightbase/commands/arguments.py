"""The arguments of the scripts, checked before torch is imported, which takes
seconds."""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse.typing import PositiveFloat, PositiveInt

from lightbase.core.config_files import config_files, users_classes
from lightbase.core.errors import UserError, did_you_mean, say
from lightbase.core.files import relative_to_cwd
from lightbase.core.folder import versions
from lightbase.core.project import PROJECT

ALL_FLAGS = ("-",)
# flags of train.py that scripts take which open a checkpoint
CONFIG_FLAGS = ("--config", "--data.", "--trainer.")


def first_look(script: str, args: Sequence[str]) -> None:
    """Answer --help, and mistakes in the flags of a script that are not flags of
    train.py. script: Its name, such as "train"."""
    if script == "train" and ("-h" in args or "--help" in args):
        print(help_of_train())
        raise SystemExit(0)
    if script in PARSERS:
        PARSERS[script]().read(args, is_first_look=True)


def help_text(script: str) -> str:
    """Return what --help of a script prints."""
    folder = Path(__file__).with_name("help")
    return (folder / f"{script}.txt").read_text("utf-8").rstrip()


def help_of_train() -> str:
    """Return help/train.txt with the YAMLs and the classes of the project."""
    networks, data, models = [], [], []
    for path, bases in users_classes():
        if bases.endswith("nn.Module"):
            networks.append(path)
        elif bases.endswith("DataModule"):
            data.append(path)
        elif bases in ("BaseModule", "LightningModule"):
            models.append(path)
    default = "Give --config FILE, or --model CLASS and --data CLASS."
    if PROJECT.default_config:
        default = "Without flags the experiment is\nconfigs/default.yaml."
    return help_text("train").format(
        default=default,
        configs=in_column([*config_files(PROJECT.configs)]),
        networks=in_column(networks),
        data=in_column(data),
        models=in_column(models),
    )


def in_column(words: list[str]) -> str:
    """Return the words with commas, broken into lines for the column of texts."""
    indent = " " * 30
    text = textwrap.fill(
        ", ".join(words), 80, initial_indent=indent, subsequent_indent=indent
    )
    return text.strip()


class ScriptParser(argparse.ArgumentParser):
    """The parser of a script. It takes no abbreviations, and mistakes are UserErrors.

    name: The script, such as "evaluate".
    passes_on: How the flags of train.py begin that the script takes, too. ALL_FLAGS:
        all that it does not know are flags of train.py.
    """

    def __init__(self, name: str, passes_on: tuple[str, ...] = ()) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        text = help_text(name)
        super().__init__(
            description=text, allow_abbrev=False, formatter_class=formatter
        )
        self.passes_on = passes_on

    def read(
        self, args: Sequence[str] | None, is_first_look: bool = False
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the arguments that are passed on.

        args: The arguments; None: of the command line.
        is_first_look: Print nothing.
        """
        if args is None:
            args = sys.argv[1:]
        if self.passes_on == ALL_FLAGS:
            return self.parse_known_args(args)
        args, passed_on = split(args, self.passes_on)
        options, unknown = self.parse_known_args(args)
        if unknown:
            self.error(f"unknown argument {unknown[0]}")
        if "ckpt_path" in options:
            path = checkpoint_file(options.ckpt_path, runs_in(passed_on))
            if str(path) != options.ckpt_path and not is_first_look:
                say(f"Checkpoint: {relative_to_cwd(path)}")
            options.ckpt_path = path
            options.trust = options.trust_checkpoint == "true"
        return options, passed_on

    def add_checkpoint_arguments(self) -> None:
        """Add the flags of scripts that open a checkpoint."""
        self.add_argument(
            "--ckpt_path",
            required=True,
            help="a checkpoint, a run's NAME or NAME/version_N, or last or best of the "
            "newest run",
        )
        self.add_argument(
            "--trust_checkpoint",
            nargs="?",
            const="true",
            default="false",
            choices=("true", "false"),
            help="build whatever the file names",
        )
        self.add_argument(  # passed on
            "--config",
            metavar="FILE",
            help="a YAML of yours: the file gives its weights only",
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(message, "see --help", 2)


def split(
    args: Sequence[str], beginnings: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Return all other arguments, and the flags that begin so with their values.
    argparse would take a value for a file."""
    others: list[str] = []
    flags: list[str] = []
    takes_value = False
    for arg in args:
        if arg.startswith(beginnings):
            flags.append(arg)
            takes_value = "=" not in arg
        elif takes_value and not arg.startswith("--"):
            flags.append(arg)
            takes_value = False
        else:
            others.append(arg)
            takes_value = False
    return others, flags


def runs_in(flags: Sequence[str]) -> str | None:
    """Return the folder of runs that the flags name, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer.default_root_dir")
    options, _ = parser.parse_known_args(flags)
    return vars(options)["trainer.default_root_dir"]  # type: ignore[no-any-return]


def checkpoint_file(text: str, root: str | None = None) -> Path:
    """Return the checkpoint that --ckpt_path names.

    text: A file; `last` or `best` of the newest run of all; or a run's folder,
        NAME/version_N or NAME for the best.ckpt of the run, NAME for its newest run.
    root: The folder of runs; logs/ unless given.
    Raises UserError if there is no such file.
    """
    path = Path(text)
    logs = Path(root) if root else PROJECT.logs
    if text in ("last", "best"):
        files = logs.rglob(f"checkpoints/{text}.ckpt")
        path = max(files, key=os.path.getmtime, default=path)
    elif not path.exists() or path.is_dir():
        if (logs / text).is_dir():
            path = logs / text
        folders = [path, *versions(path).values()]
        path = folders[-1] / "checkpoints" / "best.ckpt"
    if not path.exists():
        near = ""
        if not (logs / text).exists():
            near = did_you_mean(text, [folder.name for folder in logs.glob("*")])
        raise UserError(
            f"--ckpt_path {text}: no such file, nor a run with this checkpoint{near}",
            "python scripts/runs.py lists the runs; --best NAME the best of them",
        )
    return path


def output_file(text: str) -> Path:
    """Return the path of a file to write. Raises ArgumentTypeError if its folder is not
    there."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is a folder, or in none that is there"
        )
    return Path(text)


def evaluate() -> ScriptParser:
    """Return the parser of evaluate.py."""
    parser = ScriptParser("evaluate", CONFIG_FLAGS)
    parser.add_checkpoint_arguments()
    text = "tables of the classes, as CSV too"
    parser.add_argument("--report", nargs="?", const="", metavar="FOLDER", help=text)
    return parser


def predict() -> ScriptParser:
    """Return the parser of predict.py."""
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
    """Return the parser of export.py."""
    parser = ScriptParser("export", CONFIG_FLAGS)
    parser.add_checkpoint_arguments()
    parser.add_argument("--format", choices=["onnx", "pt2", "pth"], default="pth")
    text = "the file; beside the checkpoint unless given"
    parser.add_argument("--output", type=output_file, help=text)
    return parser


def tune() -> ScriptParser:
    """Return the parser of tune.py."""
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
    """Return the parser of sweep.py."""
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
    """Return the parser of benchmarks/benchmark.py."""
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
