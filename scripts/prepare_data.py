"""Download the data set of a config and check it, without training: for machines whose compute
nodes have no network.

python scripts/prepare_data.py --config configs/cifar10_cnn.yaml
python scripts/prepare_data.py --config configs/mnist_mlp.yaml --data.data_dir /shared/data

Takes the flags of train.py, and needs none of the devices that they ask for.
"""

import sys
from collections.abc import Sequence

from project.engine.script import short_errors, starting

with starting():
    from project.base.datamodule import TensorDataModule
    from project.base.download import prepare_data
    from project.base.errors import UserError
    from project.engine.cli import TrainingCLI
    from project.engine.parser import arguments
    from project.engine.quiet import quiet_lightning


def main(args: Sequence[str] | None = None) -> None:
    with short_errors():
        args = list(sys.argv[1:] if args is None else args)
        if not any(arg.partition("=")[0] in ("--config", "-c", "--help", "-h") for arg in args):
            raise UserError("which data? give --config, configs/cifar10_cnn.yaml for instance", 2)
        quiet_lightning()
        data = TrainingCLI(arguments(args)).datamodule
        prepare_data(data)
        name = type(data).__name__
        if not isinstance(data, TensorDataModule):
            print(f"{name}: prepared")
            return
        data.setup("fit")
        data.setup("test")
        sizes = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
        print(f"{name} is complete: {sizes} samples in {data.data_dir}")


if __name__ == "__main__":
    main()
