"""Count what the processes of a training exchange.

python benchmarks/collectives.py --ranks 1,2,4,8  # about 2 minutes on 2 cores
python benchmarks/collectives.py --config configs/mnist_mlp.yaml

Short trainings run on CPU processes (gloo), with the flags of train.py that are added.
`Collectives` sees each call of torch.distributed on rank 0: those of the library, of
Lightning, of torchmetrics, and of the reducer of ddp, which averages the gradients.

The bytes of a collective are the size of its result on a rank. A barrier has none.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import LambdaCallback
from torch.utils._python_dispatch import TorchDispatchMode

from lightbase.commands.flags import Parser
from lightbase.commands.train import parse, train_parsed
from lightbase.compat import quiet_lightning
from lightbase.data.tensors import tensors_in
from lightbase.watch.log import LogFile

FLAGS = (
    "--config configs/small_net.yaml --trainer.accelerator cpu --trainer.max_epochs 1 "
    "--trainer.limit_train_batches 12 --trainer.limit_val_batches 2 "
    "--trainer.limit_test_batches 2 --trainer.log_every_n_steps 7 "
    "--trainer.num_sanity_val_steps 0"
)
STEPS = {2: "a training step", 6: "a step that logs", 9: "every tenth step"}
"""The steps that are shown. In step 1, ddp orders its buckets anew."""
OTHERS = "the other steps together"


class Collectives(TorchDispatchMode):
    """Notes the collectives of this process in `found`: {phase of the training: [(name,
    bytes)]}."""

    phase = "the start"

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Any]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            num_bytes = 0
            if name != "barrier":  # which has a tensor only to name the device
                num_bytes = sum(tensor.nbytes for tensor in tensors_in(args[0]))
            self.found[self.phase].append((name, num_bytes))
        return func(*args, **(kwargs or {}))

    def begin(self, phase: str, *_: Any) -> None:
        self.phase = phase

    def begin_step(self, *args: Any) -> None:
        self.phase = STEPS.get(args[-1], OTHERS)  # by the index of the batch

    def save(self, save: Any, path: Any, *args: Any) -> None:
        """Write a checkpoint. Its phase has the name of the file."""
        before = self.phase
        self.phase = path.rpartition("/")[2]
        save(path, *args)
        self.phase = before

    def watch_checkpoints(self, trainer: Any, _: Any) -> None:
        trainer.save_checkpoint = partial(self.save, trainer.save_checkpoint)


def record(*flags: str) -> None:
    """Train on this rank, which torchrun has started. Rank 0 prints its collectives."""
    rank = os.environ["RANK"]
    # each process is a machine to the library: ours may have fewer cores than processes
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": rank}
    quiet_lightning()
    spec, model, data = parse([*FLAGS.split(), *flags])
    counter = Collectives()
    spec.trainer["callbacks"] = LambdaCallback(
        on_train_start=counter.watch_checkpoints,
        on_train_batch_start=counter.begin_step,
        on_validation_start=partial(counter.begin, "a validation"),
        on_validation_end=partial(counter.begin, "the end of an epoch"),
        on_train_end=partial(counter.begin, "the test and the end"),
    )
    with counter:
        train_parsed(spec, model, data, LogFile())
    if rank == "0":
        print(json.dumps(counter.found))


def count(num_ranks: str, flags: list[str]) -> dict[str, str]:
    """Train on so many processes. Return {phase: collectives and bytes}."""
    launch = f"-m torch.distributed.run --standalone --nproc-per-node={num_ranks}"
    command = [sys.executable, *launch.split(), __file__, *flags]
    with tempfile.TemporaryDirectory() as folder:
        command.append(f"--trainer.default_root_dir={folder}")
        shown = subprocess.check_output(command, text=True)
    return {
        phase: f"{len(found)}, {sum(size for _, size in found):,} B"
        for phase, found in json.loads(shown.splitlines()[-1]).items()
    }


def main() -> None:
    """Print the number of collectives in each phase, and their bytes, as Markdown."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of processes")
    options, flags = parser.parse_known_args()
    numbers = options.ranks.split(",")
    if not all(map(str.isdecimal, numbers)):
        sys.exit(f"error: --ranks {options.ranks}: give numbers, such as 1,2,4")
    columns = [count(num_ranks, flags) for num_ranks in numbers]
    print("| ranks", *numbers, sep=" | ")
    print("|---" * (len(numbers) + 1))
    for phase in columns[-1]:
        print(f"| {phase}", *[column.get(phase, 0) for column in columns], sep=" | ")


if __name__ == "__main__":
    if "RANK" in os.environ:
        record(*sys.argv[1:])
    else:
        main()
