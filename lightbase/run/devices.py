"""Which devices a run uses, and the strategies dp and fsdp2.

`settle_devices` fills in the flags, and `check_devices` checks them.
`DataParallelStrategy` splits each batch over the GPUs of a machine.
`FullyShardedStrategy` divides the weights, too, and `ShardedCheckpoints` the files.
docs/devices.md says when to use which.
"""

import contextlib
import functools
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.accelerators import (
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
)
from lightning.pytorch.plugins.environments import (
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import (
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.nn.parallel import replicate
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lightbase.compat import shard_over_all_processes
from lightbase.config.errors import UserError, rank
from lightbase.model.module import BaseModule
from lightbase.model.shards import load_shards, save_shards
from lightbase.model.transfer import load_checked


def num_gpus() -> int:
    """Return the number of GPUs of CUDA or ROCm, or 1 on an Apple computer with a
    GPU."""
    return CUDAAccelerator.auto_device_count() or int(MPSAccelerator.is_available())


def num_processes_started() -> tuple[int, int]:
    """Return (processes on each machine, machines) that torchrun or SLURM has started,
    as their environment variables tell. Return (0, 0) without them."""
    if TorchElasticEnvironment.detect():
        on_each = int(os.environ["LOCAL_WORLD_SIZE"])
        return on_each, int(os.environ["WORLD_SIZE"]) // on_each
    num_tasks = int(os.environ.get("SLURM_NTASKS", 1))
    if num_tasks > 1 and SLURMEnvironment.detect():
        num_nodes = int(os.environ.get("SLURM_NNODES", 1))
        return num_tasks // num_nodes, num_nodes
    return 0, 0


def settle_devices(trainer: Any) -> None:
    """Fill in the Trainer's flags that the user left open, in place.

    With torchrun or SLURM, they follow from the processes that it has started. Without
    them, a run gets one device. But if the user gave a strategy or a number of
    machines, it gets all devices, as in Lightning.
    """
    on_each, num_nodes = num_processes_started()
    if on_each * num_nodes > 1:
        if trainer.devices == "auto":
            trainer.devices = on_each
        if trainer.num_nodes == 1:
            trainer.num_nodes = num_nodes
        if trainer.strategy == "auto":
            trainer.strategy = "ddp"
    elif (trainer.devices, trainer.num_nodes, trainer.strategy) == ("auto", 1, "auto"):
        trainer.devices = 1


def parse_devices(devices: Any) -> Sequence[int]:
    """Return the indices of the devices. They are empty if the flag asks for all.

    devices: The flag: a number, a list, or text such as "auto", "2" (two devices) or
        "0,1" (these devices).
    """
    if devices == "auto":
        return []
    if isinstance(devices, list):
        return devices
    try:
        if isinstance(devices, str) and "," in devices:
            return [int(part) for part in devices.strip(",").split(",")]
        return range(int(devices))  # empty for -1, which means all
    except ValueError as error:
        raise UserError(
            f"trainer.devices {devices!r}: give a number, auto or [0,1]", status=2
        ) from error


def check_devices(trainer: Any) -> None:
    """Raise UserError if the Trainer's flags ask for GPUs or processes that are not
    there. Only the first process looks for GPUs, so that the error is printed once.

    trainer: The Trainer's flags, after `settle_devices`.
    """
    accelerator = trainer.accelerator
    devices = parse_devices(trainer.devices)
    is_launched = num_processes_started() != (0, 0)
    if trainer.num_nodes > 1 and not is_launched and "MASTER_ADDR" not in os.environ:
        raise UserError(  # Lightning would wait for the other machines
            f"trainer.num_nodes {trainer.num_nodes}: start it by torchrun or SLURM"
        )
    if rank() > 0:
        return
    total = num_gpus()
    if accelerator == "auto" and total:
        accelerator = "gpu"
    is_on_gpu = accelerator in ("gpu", "cuda", "mps")
    if trainer.strategy == "dp" and (is_launched or not is_on_gpu):
        raise UserError(
            "trainer.strategy dp is for GPUs: with torchrun or on CPUs use ddp"
        )
    num_cores = os.cpu_count() or 1
    if accelerator in ("auto", "cpu") and len(devices) > 2 * num_cores:
        raise UserError(
            f"trainer.devices {trainer.devices}: there are {num_cores} CPU cores"
        )
    if is_on_gpu and max(devices, default=0) >= total:
        # torch's version may end with +cpu
        raise UserError(
            f"trainer.accelerator {accelerator}, trainer.devices {trainer.devices}: "
            f"torch {torch.__version__} finds {total} GPUs of CUDA, ROCm or MPS",
            "the first one is --trainer.devices [0]; without a GPU use "
            "--trainer.accelerator cpu",
        )


def forks_processes(trainer: Any) -> bool:
    """Return whether the processes that train are forked from this one, by the
    Trainer's flags. They could not use CUDA if this process had started it."""
    return str(trainer.strategy).startswith(("ddp_fork", "ddp_notebook"))


def check_one_device(trainer: Any) -> None:
    """Raise UserError if the Trainer's flags ask for several devices. Searches and
    predictions use one device."""
    uses_one = len(parse_devices(trainer.devices)) == 1
    if not uses_one or trainer.strategy not in ("auto", "single_device"):
        raise UserError(
            f"trainer.devices {trainer.devices}, strategy {trainer.strategy}: this "
            "command runs on one device",
            "leave --trainer.strategy and --trainer.devices out",
            2,
        )


@contextlib.contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Within this context, torch computes with this number of threads, unless None."""
    num_before = torch.get_num_threads()
    torch.set_num_threads(number or num_before)
    try:
        yield
    finally:
        torch.set_num_threads(num_before)


def devices_of(strategy: Any) -> list[torch.device]:
    """Return the devices of a run on this machine. The strategy of a single device has
    no list of them."""
    return getattr(strategy, "parallel_devices", None) or [strategy.root_device]


def describe_devices(trainer: Trainer) -> str:
    """Return a line with the devices in use, and the number of GPUs that were found."""
    if isinstance(trainer.accelerator, CPUAccelerator):
        # the processes share the threads when they start
        num_threads = max(1, torch.get_num_threads() // trainer.num_devices)
        used = f"CPU, processes: {trainer.world_size}, threads of each: {num_threads}"
    else:
        # trainer.device_ids would be wrong for dp, and for [1, 0]
        names = ", ".join(map(str, devices_of(trainer.strategy)))
        used = f"{names}, machines: {trainer.num_nodes}"
    return f"Device: {used}, GPUs found: {num_gpus()}"


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits each batch over several GPUs, in the forward of the LightningModule's
    attribute `net`. torch.nn.DataParallel does the same; Lightning 2.0 removed its
    strategy "dp".

    The step, loss, metrics, logging and the optimizer run once, on the first GPU. So a
    checkpoint is the same as on one device. A layer that computes over the batch, such
    as BatchNorm, gets only the part of the batch on its GPU. The running statistics of
    BatchNorm come from the part on the first GPU.

    parallel_devices: The GPUs. The first one holds the LightningModule. The Trainer
        fills them in if they are not set.
    """

    strategy_name = "dp"
    parallel_devices: Sequence[torch.device] = ()

    @property
    def root_device(self) -> torch.device:
        """The GPU that holds the module and runs the steps."""
        return self.parallel_devices[0]

    def setup(self, trainer: Trainer) -> None:
        """Replace the forward of the network by `split_forward`, if there are several
        GPUs. Raise UserError if the network is to be compiled."""
        model: Any = self.lightning_module
        if isinstance(model, BaseModule) and model.compile_net:
            raise UserError(
                "dp cannot split a compiled network: leave model.compile_net out"
            )
        super().setup(trainer)
        if len(self.parallel_devices) > 1:
            net = model.net
            net.forward = functools.partial(split_forward, net, self.parallel_devices)

    def teardown(self) -> None:
        """Give the network its forward back."""
        model: Any = self.lightning_module
        if len(self.parallel_devices) > 1:
            # the attribute hides the method of the class
            vars(model.net).pop("forward", None)
        super().teardown()


def split_forward(
    net: nn.Module, devices: Sequence[torch.device], *args: Any, **kwargs: Any
) -> Any:
    """Return the outputs of `net` for a batch, on the first device.

    Each device gets a part of the batch and a copy of the network. Python queues the
    work of one device after the other, and the devices compute at the same time.

    args, kwargs: The arguments of forward. Their tensors are split along the first
        dimension; other values are the same on all devices.
    """
    # torch's parallel_apply would call the copies in threads, which have neither the
    # dtype of autocast nor inference mode
    args_of, kwargs_of = scatter_kwargs(args, kwargs, devices)
    devices = devices[: len(args_of)]  # a batch may have fewer samples than devices
    replicas = replicate(net, devices, detach=not torch.is_grad_enabled())
    outputs = []
    for i, replica in enumerate(replicas):
        del replica.forward  # `replicate` has copied the attribute `forward` of net
        with torch.accelerator.device_index(devices[i].index):
            # Not __call__: the hooks of `net` run once, around all parts.
            outputs.append(replica.forward(*args_of[i], **kwargs_of[i]))
    return gather(outputs, devices[0])


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2: divides weights, gradients and optimizer states over all processes. The
    module's `configure_model` says how, with `torch.distributed.fsdp.fully_shard` and
    `self.device_mesh["data_parallel"]`.

    A checkpoint is one file with whole tensors, as on one device. Lightning's strategy
    makes by default a mesh of one process for each machine: with `fully_shard`, each
    process would train weights of its own.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        shard_over_all_processes(self)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Raise UserError if a parameter is not divided: each process would train its
        own."""
        model: Any = self.lightning_module
        super().setup(trainer)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                raise UserError(
                    f"fsdp2: {name} is in no part that configure_model of "
                    f"{type(model).__name__} gives to fully_shard",
                    "call fully_shard for the module that holds it",
                )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> Any:
        """Return a checkpoint, and put its tensors into model and optimizers, as
        Lightning does. If it has shards, each process reads its own."""
        path = Path(checkpoint_path)
        mesh = self.device_mesh["data_parallel"]

        def empty_shards(shape: torch.Size, **options: Any) -> Tensor:
            places = [Shard(0) if shape else Replicate()]
            return empty(shape, device_mesh=mesh, placements=places, **options)

        checkpoint = load_shards(load_checked(path), path, empty_shards)
        if "shards" in checkpoint:
            strict = self.lightning_module.strict_loading  # type: ignore[union-attr]
            ParallelStrategy.load_model_state_dict(self, checkpoint, strict)
            ParallelStrategy.load_optimizer_state_dict(self, checkpoint)
        else:
            super().load_checkpoint(path, weights_only)
        return checkpoint


class ShardedCheckpoints(FullyShardedStrategy):
    """FSDP2 with checkpoints of which each process writes its own part, see
    `lightbase.model.shards`. No process gathers whole tensors."""

    # FullyShardedStrategy gathers them here
    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    optimizer_state = ParallelStrategy.optimizer_state

    def __init__(self) -> None:
        super().__init__()
        if importlib.util.find_spec("safetensors") is None:  # for the first checkpoint
            raise UserError(
                "fsdp2_sharded needs the package safetensors",
                "pip install -c constraints.txt safetensors",
                2,
            )

    def save_checkpoint(
        self, checkpoint: Any, filepath: Any, storage_options: Any = None
    ) -> None:
        checkpoint = save_shards(
            checkpoint, Path(filepath), self.broadcast(time.time_ns())
        )
        super().save_checkpoint(checkpoint, filepath, storage_options)


def check_strategy(strategy: Any) -> None:
    """Raise UserError for Lightning's strategy of model parallelism. Its default trains
    other weights in each process, and our loaders know no tensor parallelism."""
    is_ours = isinstance(strategy, FullyShardedStrategy)
    if isinstance(strategy, ModelParallelStrategy) and not is_ours:
        raise UserError(
            f"trainer.strategy {type(strategy).__name__} has no use here",
            "--trainer.strategy fsdp2 divides a model over all processes",
            2,
        )
