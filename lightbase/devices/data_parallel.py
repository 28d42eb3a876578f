"""The strategy "dp": one process, in which every batch is split over the GPUs of this machine."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.nn.parallel import replicate

from lightbase.compat import is_compiled
from lightbase.errors import UserError


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits the forward of the LightningModule's network, its attribute `net`, over several GPUs,
    as torch.nn.DataParallel does.

    Everything else happens once, on the first GPU: the step, the loss, the metrics, the logging and
    the optimiser; so checkpoints are those of one device. Lightning removed its own "dp" in 2.0.
    Layers that look at the whole batch, such as BatchNorm, see the part on their GPU, and their
    running statistics are those of the first one.

    parallel_devices: the first one holds the LightningModule; filled in by the Trainer unless
    given.
    """

    strategy_name = "dp"

    def __init__(
        self, parallel_devices: Sequence[torch.device] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.parallel_devices = list(parallel_devices or ())
        self.any_device = parallel_devices is not None
        self.pool = ThreadPoolExecutor(64, "replica")  # a thread starts when it is first needed

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    @property
    def net(self) -> nn.Module:
        assert self.lightning_module is not None
        try:
            return self.lightning_module.get_submodule("net")
        except AttributeError as error:
            lacks = f"which {type(self.lightning_module).__name__} lacks: call it so, or use ddp"
            raise UserError(f"trainer.strategy dp splits the network `net`, {lacks}") from error

    def setup_environment(self) -> None:
        if self.root_device.type != "cuda" and not self.any_device:
            raise UserError(
                "trainer.strategy dp splits batches over GPUs: none is used; on CPUs use ddp, "
                "or none"
            )
        if dist.is_torchelastic_launched():
            raise UserError(
                "trainer.strategy dp is one process: start it without torchrun, or use ddp"
            )
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        if any(is_compiled(module) for module in self.net.modules()):
            raise UserError(
                "trainer.strategy dp cannot split a compiled network: leave compiling out, or "
                "use ddp"
            )
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
        if len(self.parallel_devices) == 1:
            yield
            return
        net: Any = self.net
        net.forward = functools.partial(self._forward, net)
        try:
            yield
        finally:
            del net.forward  # the class's own again

    def _forward(self, net: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs: list[Tensor] = []
        map_tensors(inputs.append, (args, kwargs))
        batch_size = next((len(tensor) for tensor in inputs if tensor.dim()), None)
        if batch_size is None:
            raise UserError(
                "trainer.strategy dp splits the tensors that `net` is called with: it has got none"
            )
        devices = self.parallel_devices[
            : max(1, batch_size)
        ]  # a batch may be smaller than the number of devices
        replicas: list[Any] = replicate(net, devices, detach=not torch.is_grad_enabled())
        calls = []
        for i, replica in enumerate(replicas):
            del replica.forward  # copied from net
            keep_channels_last(net, replica)
            own_args, own_kwargs = map_tensors(
                functools.partial(part, i=i, devices=devices), (args, kwargs)
            )
            # not its __call__: the hooks of `net` run once, around all parts
            calls.append(
                in_this_context(
                    devices[i], functools.partial(replica.forward, *own_args, **own_kwargs)
                )
            )
        others = [self.pool.submit(call) for call in calls[1:]]
        outputs = [calls[0](), *(other.result() for other in others)]
        return map_tensors(
            lambda *parts: torch.cat([part.to(self.root_device) for part in parts]), *outputs
        )


def keep_channels_last(net: nn.Module, replica: nn.Module) -> None:
    """Put weights of the replica into the order that they have in `net`: torch's replicate hands on
    flat copies."""
    for module, copy in zip(net.modules(), replica.modules(), strict=True):
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
                setattr(
                    copy, name, getattr(copy, name).contiguous(memory_format=torch.channels_last)
                )


def map_tensors(function: Callable[..., Any], *values: Any) -> Any:
    """The first value, where the function of the tensors at the same place in all of them stands
    for each tensor in tuples, lists and dicts."""
    first = values[0]
    if isinstance(first, Tensor):
        return function(*values)
    if isinstance(first, dict):
        return {name: map_tensors(function, *(value[name] for value in values)) for name in first}
    if isinstance(first, tuple | list):
        mapped = [map_tensors(function, *inner) for inner in zip(*values, strict=True)]
        return mapped if isinstance(first, list) else tuple(mapped)
    return first


def part(tensor: Tensor, i: int, devices: Sequence[torch.device]) -> Tensor:
    """Part i of a tensor (N, ...), on device i; a number as it is."""
    own = tensor.tensor_split(len(devices))[i] if tensor.dim() else tensor
    return own.to(devices[i], non_blocking=True)


def in_this_context(device: torch.device, function: Callable[[], Any]) -> Callable[[], Any]:
    """The function with gradients, inference mode, autocast and the device's CUDA stream as they
    are now, here, for another thread, which starts without. torch's own parallel_apply takes over
    neither autocast's dtype nor inference mode."""
    kind = device.type
    autocast = (
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        torch.is_autocast_cache_enabled(),
    )
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    def call() -> Any:
        with (
            torch.cuda.stream(stream),  # and its device
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(kind, *autocast),
        ):
            return function()

    return call


def register() -> None:
    """Let a Trainer take strategy="dp"."""
    StrategyRegistry.register("dp", DataParallelStrategy, override=True)
