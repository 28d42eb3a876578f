"""The flags of the commands, which are read before torch is imported: --help and a
mistyped flag are answered at once. compare/flags.py has others.

The docstring of a function is the text of --help. Flags of train.py that a command
passes on are in the attribute `others` of its options. config/parser.py reads them.
"""

import argparse
import inspect
import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from lightbase.config.errors import UserError
from lightbase.config.paths import PROJECT
from lightbase.config.yaml_files import users_classes
from lightbase.run.folder import newest_version

Args = Sequence[str] | None
"""The arguments of a command. None means the arguments of the command line."""

PASSED_ON = ("--data.", "--trainer.")
"""Beginnings of the flags of train.py that a command takes if it opens a checkpoint,
beside --config."""


class Parser(argparse.ArgumentParser):
    """A parser of argparse that takes no abbreviations. A mistake raises UserError.

    text: The text for --help, such as the docstring of a function.
    """

    def __init__(self, text: str | None) -> None:
        super().__init__(
            description=inspect.cleandoc(text or ""),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(message, "see --help", 2)


def train_flags(args: Args = None) -> Sequence[str]:
    """Return the arguments of train.py. Only --help is answered here: the check of its
    flags needs torch."""
    if args is None:
        args = sys.argv[1:]
    if "-h" in args or "--help" in args:
        print(help_of_train())
        raise SystemExit(0)
    return args


def help_of_train() -> str:
    """Return help/train.txt, with the YAML files and the classes of the project."""
    default = "Give --config FILE, or --model CLASS and --data CLASS."
    if PROJECT.default_config.is_file():
        default = "Without flags the experiment is\nconfigs/default.yaml."
    classes = [path.rpartition(".")[2] for path in users_classes()]
    text = Path(__file__).with_name("help") / "train.txt"
    return text.read_text("utf-8").format(
        default=default,
        configs=in_column(sorted(x.stem for x in PROJECT.configs.glob("*.y*ml"))),
        classes=in_column(classes),
    )


def in_column(words: Iterable[str]) -> str:
    """Return the words as lines of the second column of help/train.txt."""
    return textwrap.fill(", ".join(words), 50).replace("\n", "\n" + " " * 30)


def evaluate_flags(args: Args = None) -> Namespace:
    """Test a checkpoint again, on the data and with the settings of its run.

    python scripts/evaluate.py --ckpt_path mnist_mlp --report
    python scripts/evaluate.py --ckpt_path last --trainer.accelerator cpu
    python scripts/evaluate.py --ckpt_path logs/mnist_mlp/version_0

    A checkpoint of a fold is tested on its fold, with --data.num_folds null on the
    test set of the data. The last line is a JSON object with all metrics.
    """
    parser = Parser(evaluate_flags.__doc__)
    parser.add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="tables of the classes, as CSV too",
    )
    return with_checkpoint(parser, args)


def predict_flags(args: Args = None) -> Namespace:
    """Predict with a checkpoint: what predict_step of its LightningModule returns.

    python scripts/predict.py --ckpt_path mnist_mlp digit.png
    python scripts/predict.py --ckpt_path last photos/ --top_k 3 --output classes.csv
    python scripts/predict.py --ckpt_path last --split val --output predictions.npz

    Files are images of any size, or CSV files with rows. Without files it predicts a
    split of the data, in its order. Files that cannot be read are reported, and the
    exit status is 1. Masks are written as PNG files into the folder --output. FILE.npz
    holds the tensors of predict_step.
    """
    parser = Parser(predict_flags.__doc__)
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
        help="FILE.csv, FILE.npz, or a folder for masks",
    )
    add(
        "--top_k", type=positive, metavar="K", default=1, help="the K likeliest classes"
    )
    add("--probabilities", action="store_true", help="a column for each class")
    add("--threshold", type=float, default=0.5, help="of a label's probability")
    add("files", type=Path, nargs="*", help="files, or folders of images")
    return with_checkpoint(parser, args)


def export_flags(args: Args = None) -> Namespace:
    """Write a trained network to a file that other programs load.

    python scripts/export.py --ckpt_path mnist_mlp --output digits.pth
    python scripts/export.py --ckpt_path last --format onnx

    pth holds the weights for plain PyTorch. onnx is for ONNX Runtime, pt2 for
    torch.export.load; both compute what predict.py computes, and are checked against
    it. See docs/export.md.
    """
    parser = Parser(export_flags.__doc__)
    parser.add_argument("--format", choices=["onnx", "pt2", "pth"], default="pth")
    parser.add_argument(
        "--output",
        type=output_file,
        help="the file; beside the checkpoint unless given",
    )
    return with_checkpoint(parser, args)


def with_checkpoint(parser: Parser, args: Args) -> Namespace:
    """Return the options of a command that opens a checkpoint. `ckpt_path` is the path
    of the file. `others` are --config and the flags of `PASSED_ON`, which replace
    settings of the run."""
    add = parser.add_argument
    add(
        "--ckpt_path",
        required=True,
        help="a checkpoint; a run's NAME or NAME/version_N; or last or best, of the "
        "newest run of all names. Runs are looked up in logs/, or in the folder that "
        "--trainer.default_root_dir names",
    )
    add(
        "--trust_checkpoint",
        nargs="?",
        const="true",
        default="false",
        choices=("true", "false"),
        help="build whatever the file names",
    )
    add(
        "--config",
        dest="--config",
        action="append",
        default=[],
        metavar="FILE",
        help="a YAML of yours: the file gives its weights only",
    )
    if args is None:
        args = sys.argv[1:]
    for flag in dict.fromkeys(word.partition("=")[0] for word in args):  # in order
        if flag.startswith(PASSED_ON):
            add(flag, dest=flag, action="append", nargs="?", const="true")
    options = parser.parse_intermixed_args(args)
    values = vars(options)
    flags = [name for name in values if name.startswith("--")]
    options.others = [f"{name}={value}" for name in flags for value in values[name]]
    root = values.get("--trainer.default_root_dir", [PROJECT.logs])[-1]
    options.ckpt_path = checkpoint_file(options.ckpt_path, Path(root))
    return options


def checkpoint_file(text: str, logs: Path) -> Path:
    """Return the path of the checkpoint that --ckpt_path names.

    text: The path of a file, relative to the working folder or to the repository.
        `last` or `best` is the newest file of this name in all runs. NAME/version_N, or
        the folder of a run, is the best.ckpt of this run, or its last.ckpt if it has no
        other. NAME is that of its newest run.
    logs: The folder of all runs.
    """
    path = PROJECT.found(text)
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
        raise UserError(
            f"--ckpt_path {text}: no such file, nor a run with this checkpoint",
            "python scripts/runs.py lists the runs",
        )
    return path


def output_file(text: str, endings: Sequence[str] = ()) -> Path:
    """Return the path of a file that a command will write, in a folder that exists.

    endings: The endings that are allowed, such as ".csv"; "" for a folder. Without
        endings, all are.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist")
    if endings and path.suffix.lower() not in endings:
        names = " or NAME".join(endings)
        raise argparse.ArgumentTypeError(f"{text}: give NAME{names}")
    return path


def positive(text: str) -> int:
    """Return the number of a flag. Raise ValueError unless it is 1 or more."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def positive_float(text: str) -> float:
    """Return the number of a flag. Raise ValueError unless it is above 0."""
    number = float(text)
    if not number > 0:
        raise ValueError
    return number


def tune_flags(args: Args = None) -> Namespace:
    """Find a batch size and a learning rate for an experiment before training it.

    python scripts/tune.py --config configs/mnist_mlp.yaml --find lr --min_lr 1e-5 \\
      --max_lr 1

    Lightning's Tuner doubles the batch size until the memory is full, or at
    --max_batch_size, and suggests the largest size that fits. Its finder of the
    learning rate raises it from --min_lr to --max_lr, and suggests the rate at which
    the loss falls fastest. lr.png in the folder NAME_tune has the losses. All flags of
    train.py work too.
    """
    parser = Parser(tune_flags.__doc__)
    both = ["batch_size", "lr"]
    add = parser.add_argument
    add("--find", nargs="+", choices=both, default=both, help="what to search")
    add("--max_batch_size", type=positive, default=8192, help="default: 8192")
    add("--min_lr", type=positive_float, default=1e-5, help="the first learning rate")
    add("--max_lr", type=positive_float, default=1.0, help="the last learning rate")
    add("--num_steps", type=positive, default=500, help="steps from first to last")
    options, others = parser.parse_known_args(args)
    options.others = others
    return options
