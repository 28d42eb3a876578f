"""Which lines of a training wait for the GPU: noted on one, or on a device that stands in for one.

The stand-in computes on the CPU. Its tensors report the device "meta", whose gradients autograd
computes in the caller's thread. What waits is what waits on CUDA: to read a number, to ask where a
mask is true, to copy from or into memory that is not page-locked.
"""

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import dataloader

from lightbase.curves import MayMissSteps
from lightbase.data.batches import TensorBatches
from lightbase.data.module import BaseDataModule

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
# between a line that waits and its note
BETWEEN = (__file__, str(Path(torch.__file__).parent), str(warnings.__file__))
READS_VALUES = (
    *("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select"),
    *("bincount", "repeat_interleave", "_unique2", "unique_dim", "unique_consecutive"),
)


class OnDevice(Tensor):
    """values: the tensor's own, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "OnDevice":
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        make: Any = torch.Tensor._make_wrapper_subclass
        tensor = make(cls, values.size(), device=DEVICE, dtype=values.dtype, **layout)
        tensor.values = values
        return tensor  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(operation, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:  # a checkpoint holds the values
        return self.values.__reduce_ex__(protocol)


def compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of OnDevice and other tensors: OnDevice where one of the inputs, or the device that is asked
    for, is."""
    leaves = tree_leaves((args, kwargs))
    inputs = {id(leaf.values): leaf for leaf in leaves if isinstance(leaf, OnDevice)}
    device = kwargs.get("device") or (DEVICE if inputs else CPU)
    args, kwargs = tree_map_only(OnDevice, lambda tensor: tensor.values, (args, kwargs))
    result = operation(*args, **kwargs | ({"device": CPU} if "device" in kwargs else {}))
    if device != DEVICE:
        return result

    def wrap(tensor: Tensor) -> OnDevice:
        # an operation in place gives its input
        return inputs[id(tensor)] if id(tensor) in inputs else OnDevice(tensor)

    return tree_map_only(Tensor, wrap, result)


class StandIn(TorchDispatchMode):
    """While it is on, "meta" is this device, and `tell(what)` hears of all that waits for it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell = tell
        self.pinned: dict[int, Tensor] = {}  # by address; kept, so that no other takes it
        self.functions = Functions(self)

    def __enter__(self) -> Any:
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self.functions.__exit__(*args)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        if name == "to":  # comes whole in inference mode
            with self, torch._C.DisableTorchFunction():
                return operation.decompose(*args, **kwargs)
        if reason := self.wait(name, args, kwargs):
            self.tell(reason)
        return compute(operation, args, kwargs)

    def wait(self, name: str, args: Any, kwargs: dict[str, Any]) -> str | None:
        is_on_device = any(isinstance(leaf, OnDevice) for leaf in tree_leaves((args, kwargs)))
        if not is_on_device and kwargs.get("device") != DEVICE:
            return None
        tensors = [leaf for leaf in tree_leaves(args[1:2]) if isinstance(leaf, Tensor)]
        has_mask = any(tensor.dtype == torch.bool for tensor in tensors)
        is_index = name in ("index", "index_put", "index_put_", "_index_put_impl_")
        if name in READS_VALUES or (is_index and has_mask):
            return name
        source, target = args[0], kwargs.get("device")
        if name == "copy_":
            source, target = args[1], args[0].device
            kwargs = {"non_blocking": len(args) > 2 and args[2]} | kwargs
        elif name != "_to_copy" or target is None:
            return None
        if not isinstance(source, Tensor) or source.device == target:
            return None
        # into memory of the CPU it is not known when the values are there
        is_quick = source.device == CPU and kwargs.get("non_blocking") and self.is_pinned(source)
        return None if is_quick else f"{name} from {source.device} to {target}"

    def pin(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned


class Functions(TorchFunctionMode):
    """What does not come to a TorchDispatchMode."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.pin_memory:
            return self.device.pin(args[0])
        if function is Tensor.is_pinned:
            return self.device.is_pinned(args[0])
        if function is Tensor.tolist and isinstance(args[0], OnDevice):
            return args[0].cpu().tolist()
        target = torch.device(kwargs.get("device") or CPU)
        if function in (torch.tensor, torch.as_tensor) and target == DEVICE:
            return function(*args, **kwargs | {"device": CPU}).to(DEVICE)
        return function(*args, **kwargs)


class StandInAccelerator(Accelerator):
    """--trainer.accelerator stand_in"""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [DEVICE] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "stand_in"


AcceleratorRegistry.register("stand_in", StandInAccelerator)
# Lightning's own choice would be the CPU
StrategyRegistry.register("stand_in", SingleDeviceStrategy, device=DEVICE)


class Watch(MayMissSteps):
    """Counts the waits that `tell` hears of: `found` in training steps that are no log steps and in
    the batches of a validation, `allowed` in log steps; those at the ends of epochs do not count.
    By stage, reason and line."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.allowed: Counter[str] = Counter()
        # since the last training step, or call of several, ended
        self.newest: Counter[str] = Counter()
        self.stage: str | None = None

    def tell(self, reason: str) -> None:
        if self.stage:
            stack = reversed(traceback.extract_stack())
            frame = next(frame for frame in stack if not frame.filename.startswith(BETWEEN))
            where = f"{frame.filename}:{frame.lineno}, {frame.line}"
            self.newest[f"{self.stage}: {reason} in {where}"] += 1

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.stage, self.step = "training", trainer.global_step
        self.was_log_step = True  # with the loader's start

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        every = trainer.log_every_n_steps
        is_log_step = trainer.global_step // every > self.step // every
        # after this hook Lightning writes the curves
        self._add(self.allowed if is_log_step or self.was_log_step else self.found)
        self.step, self.was_log_step = trainer.global_step, is_log_step
        if trainer.is_last_batch:
            self.stage = None

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.stage = None if trainer.sanity_checking else "validation"

    def on_validation_batch_end(
        self, trainer: Any, _: Any, __: Any, ___: Any, batch_idx: int, *____: Any
    ) -> None:
        if self.stage and batch_idx + 1 == trainer.num_val_batches[0]:
            self._add(self.found)
            self.stage = None

    def _add(self, counts: Counter[str]) -> None:
        counts.update(self.newest)
        self.newest.clear()


@contextlib.contextmanager
def real_gpu(tell: Callable[[str], None]) -> Iterator[None]:
    """As StandIn, of the GPU itself."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            tell("waits")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def stand_in(tell: Callable[[str], None]) -> Iterator[None]:
    """The same of the stand-in, with data that is resident there where `resident` is true, and
    pinned elsewhere."""

    def resident(self: BaseDataModule, data: TensorBatches) -> TensorBatches:
        return self.on_gpu.setdefault(data, data.to(DEVICE)) if self.resident else data

    # the loader asks torch whether there is an accelerator to pin memory for
    fake = ModuleType("torch")
    accelerator = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: DEVICE)
    fake.__dict__.update(torch.__dict__, accelerator=accelerator)
    scaler = torch.amp.GradScaler("cpu")  # of 16-mixed
    with (
        patch.object(torch.amp, "GradScaler", lambda device: scaler),
        patch.object(BaseDataModule, "_resident", resident),
        patch.object(dataloader, "torch", fake),
        StandIn(tell),
    ):
        yield
