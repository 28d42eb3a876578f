"""The strategy "dp": one process, in which every batch is split over the GPUs of this machine."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import nn
from torch.nn.parallel import replicate
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lightbase.errors import UserError
from lightbase.module import BaseModule


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

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    @property
    def net(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module.get_submodule("net")

    def setup(self, trainer: Trainer) -> None:
        model = self.lightning_module
        if isinstance(model, BaseModule) and model.compile_net:
            what = "trainer.strategy dp cannot split a compiled network"
            raise UserError(f"{what}: leave model.compile_net {model.compile_net} out, or use ddp")
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
        # torch's parallel_apply passes on neither autocast's dtype nor inference mode
        args_of, kwargs_of = scatter_kwargs(args, kwargs, self.parallel_devices)
        devices = self.parallel_devices[: len(args_of)]  # a batch may be smaller
        outputs = []
        for i, replica in enumerate(replicate(net, devices, detach=not torch.is_grad_enabled())):
            del replica.forward  # copied from net
            with torch.accelerator.device_index(devices[i].index):
                # not __call__: the hooks of `net` run once, around all parts
                outputs.append(replica.forward(*args_of[i], **kwargs_of[i]))
        return gather(outputs, self.root_device)


def register() -> None:
    """Let a Trainer take strategy="dp"."""
    StrategyRegistry.register("dp", DataParallelStrategy, override=True)
