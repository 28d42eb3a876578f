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
    """Splits the forward of the LightningModule's attribute `net` over several GPUs.

    Step, loss, metrics, logging and optimizer run once, on the first GPU; so checkpoints are the
    same as on one device. torch.nn.DataParallel splits in the same way; Lightning's strategy "dp"
    was removed in 2.0. A layer that looks at the batch, such as BatchNorm, sees the part on its
    GPU; its running statistics are those of the first GPU.

    parallel_devices: the first one holds the LightningModule. The Trainer fills them in by default.
    """

    strategy_name = "dp"

    def __init__(
        self, parallel_devices: Sequence[torch.device] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.parallel_devices = list(parallel_devices or ())
        self.needs_gpus = parallel_devices is None
        self.pool = ThreadPoolExecutor(64, "replica")  # a thread starts when it is first needed

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    @property
    def net(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module.get_submodule("net")

    def setup_environment(self) -> None:
        has_gpus = self.root_device.type == "cuda" or not self.needs_gpus
        if not has_gpus or dist.is_torchelastic_launched():
            way_out = "with torchrun or on CPUs use ddp"
            raise UserError(f"trainer.strategy dp is one process with several GPUs: {way_out}")
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        if any(is_compiled(module) for module in self.net.modules()):
            way_out = "leave compiling out, or use ddp"
            raise UserError(f"trainer.strategy dp cannot split a compiled network: {way_out}")
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
            del net.forward  # the forward of the class is back

    def _forward(self, net: nn.Module, *args: Any, **kwargs: Any) -> Any:
        devices = self.parallel_devices[: max(1, batch_size_of((args, kwargs)))]
        replicas: list[Any] = replicate(net, devices, detach=not torch.is_grad_enabled())
        calls = []
        for i, replica in enumerate(replicas):
            del replica.forward  # copied from net
            keep_channels_last(net, replica)
            split = functools.partial(part, i=i, devices=devices)
            part_args, part_kwargs = map_tensors(split, (args, kwargs))
            # not __call__: the hooks of `net` run once, around all parts
            forward = functools.partial(replica.forward, *part_args, **part_kwargs)
            calls.append(in_this_context(devices[i], forward))
        others = [self.pool.submit(call) for call in calls[1:]]
        outputs = [calls[0](), *(other.result() for other in others)]
        return map_tensors(self._join, *outputs)

    def _join(self, *parts: Tensor) -> Tensor:
        return torch.cat([part.to(self.root_device) for part in parts])


def batch_size_of(values: Any) -> int:
    """The length of the first tensor in nested tuples, lists and dicts that is not a number."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, values)
    for tensor in tensors:
        if tensor.dim():
            return len(tensor)
    raise UserError("trainer.strategy dp splits the tensors that `net` gets as arguments: got none")


def keep_channels_last(net: nn.Module, replica: nn.Module) -> None:
    """Put the replica's weights into the order that they have in `net`: torch's copies are flat."""
    order = torch.channels_last
    for module, copy in zip(net.modules(), replica.modules(), strict=True):
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 4 and weight.is_contiguous(memory_format=order):
                # the weights of a replica are plain attributes
                setattr(copy, name, getattr(copy, name).contiguous(memory_format=order))


def map_tensors(function: Callable[..., Any], *values: Any) -> Any:
    """The first value with function(tensor of each value at this place) for each of its tensors.

    values: tuples, lists and dicts of equal structure. What is no tensor stays as in the first.
    """
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
    """Part i of a tensor (N, ...) on device i; a tensor without dimensions is not split."""
    if tensor.dim():
        tensor = tensor.tensor_split(len(devices))[i]
    return tensor.to(devices[i], non_blocking=True)


def in_this_context(device: torch.device, function: Callable[[], Any]) -> Callable[[], Any]:
    """The function with this thread's gradient mode, inference mode, autocast and CUDA stream.

    Another thread starts without them. torch's parallel_apply passes on neither autocast's dtype
    nor inference mode.
    """
    kind = device.type
    is_autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    caches = torch.is_autocast_cache_enabled()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    def call() -> Any:
        with (
            torch.cuda.stream(stream),  # and its device
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(kind, dtype, is_autocast, caches),
        ):
            return function()

    return call


def register() -> None:
    """Let a Trainer take strategy="dp"."""
    StrategyRegistry.register("dp", DataParallelStrategy, override=True)
