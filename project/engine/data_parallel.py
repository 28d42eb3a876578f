"""The strategy "dp": one process, in which every batch is split over the GPUs of this machine."""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.nn.parallel import replicate

from project.base.errors import UserError


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits the forward of the system's network `net` over several GPUs, as torch.nn.DataParallel does.

    Everything else happens once, on the first GPU: the step, the loss, the metrics, the logging and the optimiser; so
    checkpoints are those of one device. Lightning removed its own "dp" in 2.0. Layers that look at the whole batch,
    such as BatchNorm, see the part on their GPU, and their running statistics are those of the first one.

    parallel_devices: the first one holds the system; filled in by the Trainer unless given.
    """

    strategy_name = "dp"

    def __init__(self, parallel_devices: Sequence[torch.device] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.parallel_devices = list(parallel_devices or ())
        self.any_device = parallel_devices is not None
        self.pool: ThreadPoolExecutor | None = None

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    def setup_environment(self) -> None:
        if self.root_device.type != "cuda" and not self.any_device:
            raise UserError("trainer.strategy dp splits batches over GPUs: none is used; on CPUs use ddp, or none")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise UserError("trainer.strategy dp is one process: start it without torchrun, or use ddp")
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        net = getattr(self.lightning_module, "net", None)
        if not isinstance(net, nn.Module):
            raise UserError(f"trainer.strategy dp splits `net`, which {type(self.lightning_module).__name__} lacks")
        if any(is_compiled(module) for module in net.modules()):
            raise UserError("trainer.strategy dp cannot split a compiled network: leave compiling out, or use ddp")
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.split_forward():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.split_forward():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.split_forward():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.split_forward():
            return super().predict_step(*args, **kwargs)

    @contextlib.contextmanager
    def split_forward(self) -> Iterator[None]:
        """Within it, `net` runs on all devices."""
        assert self.lightning_module is not None
        net: Any = self.lightning_module.net
        if len(self.parallel_devices) == 1:
            yield
            return
        net.forward = functools.partial(self._forward, net)
        try:
            yield
        finally:
            del net.forward  # the class's own again

    def _forward(self, net: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch_size = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        devices = self.parallel_devices[: max(1, batch_size)]  # a batch may be smaller than the number of devices
        replicas: list[Any] = replicate(net, devices, detach=not torch.is_grad_enabled())
        for replica in replicas:
            del replica.forward  # copied from net
        parts = [
            (part(args, i, devices), {name: part(value, i, devices) for name, value in kwargs.items()})
            for i in range(len(devices))
        ]
        if self.pool is None:
            self.pool = ThreadPoolExecutor(len(self.parallel_devices), "replica")
        context = same_context(devices)
        others = [self.pool.submit(run_replica, replicas[i], *parts[i], context[i]) for i in range(1, len(devices))]
        outputs = [run_replica(replicas[0], *parts[0], context[0]), *(other.result() for other in others)]
        return gather(outputs, self.root_device)

    def teardown(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None
        super().teardown()


def is_compiled(module: nn.Module) -> bool:
    """Whether by torch.compile(module) or by module.compile(), which leaves no other trace than this attribute."""
    return module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)


def part(value: Any, i: int, devices: Sequence[torch.device]) -> Any:
    """Part i of a tensor (N, ...), on device i; the same for each in a tuple; anything else as it is."""
    if isinstance(value, Tensor):
        return value.tensor_split(len(devices))[i].to(devices[i], non_blocking=True)
    return tuple(part(inner, i, devices) for inner in value) if isinstance(value, tuple) else value


def same_context(devices: Sequence[torch.device]) -> list[Any]:
    """For each device a function that returns a context: gradients, inference mode, autocast and CUDA stream as they
    are now, here. A new thread starts without; torch's own parallel_apply takes over neither autocast's dtype nor
    inference mode."""
    kind = devices[0].type
    autocast = (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    streams = [torch.cuda.current_stream(device) if kind == "cuda" else None for device in devices]

    @contextlib.contextmanager
    def context(stream: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))  # and its device
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast(kind, *autocast))
            yield

    return [functools.partial(context, stream) for stream in streams]


def run_replica(replica: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
    with context():
        return replica.forward(*args, **kwargs)  # the hooks of `net` run once, around all parts


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """The parts (N_i, ...) joined to (N, ...) on the device, also in tuples, lists and dicts."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, dict):
        return {name: gather([output[name] for output in outputs], device) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(gather(parts, device) for parts in zip(*outputs, strict=True))
    return first


StrategyRegistry.register("dp", DataParallelStrategy, description="Splits each batch over the GPUs of one process")
