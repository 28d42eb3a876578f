"""The flags of the scripts, checked before torch is imported, which takes seconds.

`lightbase.commands.script.starting` calls `first_look` before the imports of a script,
so --help and a mistyped flag are answered at once. Afterwards the script reads the same
arguments again, with the parser from the function of its name: `evaluate`, `predict`,
`export`, `tune`, `sweep` or `benchmark`.

Read `ScriptParser.read` and `CheckpointParser.read` first. They divide the arguments
between the script and train.py, whose flags are in lightbase/config/parser.py.
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from jsonargparse.typing import PositiveFloat, PositiveInt

from lightbase.config.errors import UserError, did_you_mean
from lightbase.config.paths import PROJECT
from lightbase.config.yaml_files import config_files, users_classes
from lightbase.run.folder import newest_version

Args = Sequence[str] | None
"""The arguments of a command. None means the arguments of the command line."""

CONFIG_FLAGS = ("--data.", "--trainer.")
"""Beginnings of the flags of train.py that a script takes if it opens a checkpoint,
beside --config."""


def first_look(script: str, args: Sequence[str]) -> None:
    """Answer --help, and report a mistake in the flags of a script, before torch is
    imported.

    Of train.py only --help is answered here: the check of its other flags needs torch.
    A script that is not in `PARSERS` is left alone.

    script: The name of the script, such as "train".
    args: The arguments of the command line.
    Raise SystemExit after --help. Raise UserError for a flag that the script does not
    take, and for a checkpoint that does not exist.
    """
    if script == "train" and ("-h" in args or "--help" in args):
        print(help_of_train())
        raise SystemExit(0)
    if script in PARSERS:
        PARSERS[script]().read(args)


def help_text(script: str) -> str:
    """Return the text for --help of a script, from help/SCRIPT.txt.

    argparse prints it between the usage and the list of flags. For train.py the text
    holds all of this.

    script: The name of the script, such as "evaluate".
    """
    file = Path(__file__).with_name("help") / f"{script}.txt"
    return file.read_text("utf-8").rstrip()


def help_of_train() -> str:
    """Return the text for --help of train.py: help/train.txt, with the YAML files and
    the bare names of the classes of the project filled in.

    The names are read from the source code, because an import would import torch.
    """
    default = "Give --config FILE, or --model CLASS and --data CLASS."
    if PROJECT.default_config.is_file():
        default = "Without flags the experiment is\nconfigs/default.yaml."
    classes = [path.rpartition(".")[2] for path in users_classes()]
    return help_text("train").format(
        default=default,
        configs=in_column(config_files(PROJECT.configs)),
        classes=in_column(classes),
    )


def in_column(words: Iterable[str]) -> str:
    """Return the words as text for the second column of help/train.txt.

    The words are separated by commas, in lines of at most 80 characters. Each line but
    the first begins with 30 spaces: the name of the flag is before the first one.
    """
    return textwrap.fill(", ".join(words), 50).replace("\n", "\n" + " " * 30)


class ScriptParser(argparse.ArgumentParser):
    """The parser of a script. It takes no abbreviations, and mistakes are UserErrors.

    name: The script, such as "evaluate". Its help text is help/NAME.txt.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            description=help_text(name),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def read(self, args: Args) -> tuple[argparse.Namespace, list[str]]:
        """Return the options of the script, and all other arguments, which are for the
        parser of train.py.

        Raise UserError for a wrong value.
        """
        return self.parse_known_args(args)

    def error(self, message: str) -> NoReturn:
        """Raise a UserError with argparse's message. argparse would exit."""
        raise UserError(message, "see --help", 2)


class CheckpointParser(ScriptParser):
    """The parser of a script that opens a checkpoint. Of the flags of train.py it takes
    --config and those of `CONFIG_FLAGS`, which replace settings of the run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.add_argument(
            "--ckpt_path",
            required=True,
            help="a checkpoint; a run's NAME or NAME/version_N; or last or best, of "
            "the newest run of all names. Runs are looked up in logs/, or in the "
            "folder that --trainer.default_root_dir names",
        )
        self.add_argument(
            "--trust_checkpoint",
            nargs="?",
            const="true",
            default="false",
            choices=("true", "false"),
            help="build whatever the file names",
        )
        self.add_argument(
            "--config",
            action="append",
            default=[],
            metavar="FILE",
            help="a YAML of yours: the file gives its weights only",
        )

    def read(self, args: Args) -> tuple[argparse.Namespace, list[str]]:
        """Return the options of the script, and the arguments for the parser of
        train.py. In the options, `ckpt_path` is the path of the file.

        Raise UserError for an unknown flag, for a wrong value, and for a checkpoint
        that does not exist.
        """
        if args is None:
            args = sys.argv[1:]
        # argparse divides flags with their values from files, which may stand between
        for flag in dict.fromkeys(arg.partition("=")[0] for arg in args):
            if flag.startswith(CONFIG_FLAGS):
                self.add_argument(flag, dest=flag, nargs="?", const="true")
        options = self.parse_intermixed_args(args)
        passed_on = [f"--config={file}" for file in options.config]
        for flag, value in vars(options).items():
            if flag.startswith(CONFIG_FLAGS):
                passed_on.append(f"{flag}={value}")
        root = vars(options).get("--trainer.default_root_dir")
        options.ckpt_path = checkpoint_file(options.ckpt_path, root or PROJECT.logs)
        return options, passed_on


def checkpoint_file(text: str, root: str | Path) -> Path:
    """Return the path of the checkpoint that --ckpt_path names.

    text: The path of a file, relative to the working folder or to the repository.
        `last` or `best` is the newest file of this name in all runs. NAME/version_N, or
        the folder of a run, is the best.ckpt of this run, or its last.ckpt if it has no
        other. NAME is that of its newest run.
    root: The folder of all runs.
    Raise UserError if there is no such file.
    """
    path = PROJECT.found(text)
    logs = Path(root)
    if text in ("last", "best"):
        path = max(
            logs.rglob(f"checkpoints/{text}.ckpt"), key=os.path.getmtime, default=path
        )
    elif not path.is_file():
        if (logs / text).is_dir():
            path = logs / text
        newest = newest_version(path)
        if newest.exists():  # else `path` is the folder of a run
            path = newest
        folder = path / "checkpoints"
        path = folder / "best.ckpt"
        if not path.is_file():
            path = folder / "last.ckpt"
    if not path.exists():
        names = {folder.name for folder in logs.glob("*")} - {text}
        raise UserError(
            f"--ckpt_path {text}: no such file, nor a run with this checkpoint"
            + did_you_mean(text, names),
            "python scripts/runs.py lists the runs",
        )
    return path


def output_file(text: str, endings: Sequence[str] = ()) -> Path:
    """Return the path of a file that a script will write. argparse calls this function
    with the text of a flag.

    endings: The endings that are allowed, such as ".csv"; "" for a folder. Without
        endings, all are.
    Raise ArgumentTypeError for another ending, or if the folder does not exist.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist")
    if endings and path.suffix.lower() not in endings:
        names = " or NAME".join(endings)
        raise argparse.ArgumentTypeError(f"{text}: give NAME{names}")
    return path


def evaluate() -> CheckpointParser:
    """Return the parser of evaluate.py."""
    parser = CheckpointParser("evaluate")
    parser.add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="tables of the classes, as CSV too",
    )
    return parser


def predict() -> CheckpointParser:
    """Return the parser of predict.py.

    All arguments that are no flags are files. Without files a split is predicted.
    """
    parser = CheckpointParser("predict")
    add = parser.add_argument
    add(
        "--split",
        choices=["train", "val", "test"],
        default="test",
        help="the set without files",
    )
    add(
        "--output",
        type=partial(output_file, endings=(".csv", ".npz", "")),
        help="FILE.csv, FILE.npz, or a folder for masks and images",
    )
    add(
        "--top_k",
        type=PositiveInt,
        metavar="K",
        default=1,
        help="the K likeliest classes",
    )
    add("--probabilities", action="store_true", help="a column for each class")
    add("--threshold", type=float, default=0.5, help="of a label's probability")
    add("files", type=Path, nargs="*", help="files, or folders of images")
    return parser


def export() -> CheckpointParser:
    """Return the parser of export.py."""
    parser = CheckpointParser("export")
    parser.add_argument("--format", choices=["onnx", "pt2", "pth"], default="pth")
    parser.add_argument(
        "--output",
        type=output_file,
        help="the file; beside the checkpoint unless given",
    )
    return parser


def tune() -> ScriptParser:
    """Return the parser of tune.py. All flags that it does not know are flags of
    train.py; they describe the experiment."""
    parser = ScriptParser("tune")
    both = ["batch_size", "lr"]
    add = parser.add_argument
    add("--find", nargs="+", choices=both, default=both, help="what to search")
    add("--max_batch_size", type=PositiveInt, default=8192, help="default: 8192")
    add("--min_lr", type=PositiveFloat, default=1e-5, help="the first learning rate")
    add("--max_lr", type=PositiveFloat, default=1.0, help="the last learning rate")
    add("--num_steps", type=PositiveInt, default=500, help="steps from first to last")
    return parser


def sweep() -> ScriptParser:
    """Return the parser of sweep.py. All flags that it does not know are flags of
    train.py; each trial has them."""
    parser = ScriptParser("sweep")
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
    return parser


def benchmark() -> ScriptParser:
    """Return the parser of benchmarks/benchmark.py."""
    parser = ScriptParser("benchmark")
    add = parser.add_argument
    add("--parts", nargs="+", choices=["mnist", "cifar"], default=["mnist", "cifar"])
    add("--rounds", type=int, default=3, help="turns of each contestant")
    add("--steps", type=int, default=400, help="of each contestant, in a round")
    return parser


PARSERS = {
    function.__name__: function
    for function in (evaluate, predict, export, tune, sweep, benchmark)
}
"""By the names of the scripts whose import takes seconds."""
