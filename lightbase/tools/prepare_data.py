"""Download the data set of a config and check it, without training: for machines whose compute
nodes have no network.

python scripts/prepare_data.py --config configs/cifar10_cnn.yaml
python scripts/prepare_data.py --config configs/mnist_mlp.yaml --data.data_dir /shared/data

Takes the flags of train.py, and needs none of the devices that they ask for.
"""

import sys
from collections.abc import Sequence

from lightbase.cli.command_line import CommandLine
from lightbase.cli.script import short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError


def main(args: Sequence[str] | None = None) -> None:
    with short_errors():
        line = CommandLine(sys.argv[1:] if args is None else args)
        if not line.configs and not line.has("--help", "-h"):
            raise UserError("which data? give --config, configs/cifar10_cnn.yaml for instance", 2)
        quiet_lightning()
        data = TrainingCLI(line.parser_args).datamodule
        data.prepare_data()
        name = type(data).__name__
        if not isinstance(data, BaseDataModule):
            print(f"{name}: prepared")
            return
        data.setup("fit")
        data.setup("test")
        sizes = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
        print(f"{name} is complete: {sizes} samples in {data.data_dir}")
