"""The flags of sweep.py and runs.py, which are read before torch is imported: see
lightbase/commands/flags.py."""

from argparse import Namespace
from functools import partial
from pathlib import Path

from lightbase.commands.flags import Args, Parser, output_file, positive
from lightbase.config.paths import PROJECT


def sweep_flags(args: Args = None) -> Namespace:
    """Search the flags of train.py. Each trial is a run; lists alone are a grid.

    python scripts/sweep.py --config configs/small_net.yaml --search model.lr=0.001,0.01
    python scripts/sweep.py ... --search model.lr=log:1e-4..1e-1 \\
      --search data.batch_size=16..512 --trials 20

    Optuna's TPE chooses the values of ranges by --monitor. Trials are not tested,
    except folds alone; the end has the command that tests the best. The same command
    continues after a kill. Several of them at once share the trials. All flags of
    train.py work too. See docs/sweep.md.
    """
    parser = Parser(sweep_flags.__doc__)
    add = parser.add_argument
    add(
        "--search",
        action="append",
        required=True,
        metavar="FLAG=VALUES",
        help="repeatable",
    )
    add("--trials", type=positive, help="number of trials; of a grid: at most")
    add(
        "--name",
        help="the sweep is in ROOT/NAME; the config's name and _sweep unless given",
    )
    add(
        "--storage",
        metavar="URL",
        help="Optuna's database, such as postgresql+psycopg://HOST/DATABASE; "
        "the file study.journal of the sweep unless given",
    )
    options, others = parser.parse_known_args(args)
    options.others = others
    return options


def runs_flags(args: Args = None) -> Namespace:
    """Runs side by side: their progress, their results, and the settings in which they
    differ.

    python scripts/runs.py
    python scripts/runs.py mnist_mlp "sweep/*" --sort "best val/acc"
    python scripts/runs.py mnist_mlp --csv runs.csv
    python scripts/runs.py --group
    python scripts/runs.py --compare mnist_mlp other
    python scripts/runs.py mnist_mlp --plot curves.png
    python scripts/evaluate.py --ckpt_path $(python scripts/runs.py --best mnist_mlp)

    NAME is the --name of train.py or sweep.py, NAME/version_N, a folder of runs, or a
    pattern. Without a NAME the table has all runs. See docs/runs.md.
    """
    parser = Parser(runs_flags.__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which runs; all unless given")
    add(
        "--trainer.default_root_dir",
        dest="root",
        metavar="FOLDER",
        type=Path,
        default=PROJECT.logs,
        help="as of train.py",
    )
    add("--sort", metavar="COLUMN", help="by this column, of metrics the best first")
    add("--test", action="store_true", help="add the test of each run")
    add(
        "--plot",
        type=partial(output_file, endings=(".png", ".pdf", ".svg")),
        metavar="FILE",
        help="draw the curves, as .png, .pdf or .svg",
    )
    add(
        "--best",
        action="store_true",
        help="print the path of the best checkpoint, by validation",
    )
    add("--group", action="store_true", help="one row for runs of several seeds")
    add("--compare", action="store_true", help="the difference of two NAMEs")
    add(
        "--csv",
        type=partial(output_file, endings=(".csv",)),
        metavar="FILE",
        help="write the table, with all digits",
    )
    return parser.parse_args(args)
