"""What the processes of a training exchange. docs/scale.md has a table of these
counts, made with the same code."""

import json
from collections import defaultdict
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from paths import TINY, argv
from ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from lightbase.commands.train import parse, train_parsed
from lightbase.compat import quiet_lightning
from lightbase.data.tensors import tensors_in
from lightbase.watch.log import LogFile

SMALL = "--trainer.max_epochs 1 --trainer.log_every_n_steps 7"
SMALL += " --trainer.limit_train_batches 12 --trainer.num_sanity_val_steps 0"


class Collectives(TorchDispatchMode):
    """Notes the collectives of this process in `found`: {phase of the training: [(name,
    bytes)]}. The bytes are the size of the result."""

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

    def begin_step(self, *args: Any) -> None:
        self.phase = f"step {args[-1]}"  # the index of the batch


def record(root: str, *flags: str) -> None:
    """Train on this rank. Rank 0 prints its collectives."""
    quiet_lightning()
    place = ["--trainer.default_root_dir", root, "--trainer.strategy", "ddp"]
    spec, model, data = parse(argv("--config", TINY, *place, SMALL, *flags))
    counter = Collectives()
    spec.trainer["callbacks"] = LambdaCallback(on_train_batch_start=counter.begin_step)
    with counter:
        train_parsed(spec, model, data, LogFile())
    print(json.dumps(counter.found))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ("--model.net.sizes [192,4] --data.num_train 2000", []),
        # a stream asks before each batch whether all ranks have one
        (
            "--model.net.sizes [10,4] --data streams.Streams --data.batch_size 16",
            [["allreduce", 8]],
        ),
    ],
)
def test_a_step_exchanges_gradients_and_nothing_else(tmp_path, num_ranks, flags, more):
    result = on_ranks(
        tmp_path, num_ranks, "test_collectives.record", tmp_path, *flags.split()
    )
    assert not any(result.statuses), result.outputs
    found = json.loads(result.outputs[0].splitlines()[-1])
    sizes = [int(size) for size in flags.split("[")[1].split("]")[0].split(",")]
    gradients = ["allreduce", (sizes[0] * sizes[1] + sizes[1]) * 4]  # in float32
    # in step 1, ddp orders its buckets anew
    assert found["step 2"] == found["step 3"] == [gradients, *more]
    # whether a signal came, and whether last.ckpt is due: two int64
    assert found["step 9"] == [gradients, ["allreduce", 16], *more]
