"""The strategy "dp": one process splits each batch over the GPUs of a machine."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn.parallel import replicate
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lightbase.core.errors import UserError
from lightbase.core.module import BaseModule


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits the forward of the LightningModule's attribute `net` over several GPUs.

    Step, loss, metrics, logging and optimizer run once, on the first GPU; so
    checkpoints are the same as on one device. torch.nn.DataParallel splits in the same
    way; Lightning's strategy "dp" was removed in 2.0. A layer that looks at the batch,
    such as BatchNorm, sees the part on its GPU; its running statistics are those of the
    first GPU.

    parallel_devices: The GPUs. The first one holds the LightningModule. The Trainer
        fills them in by default.
    """

    strategy_name = "dp"

    def __init__(
        self, parallel_devices: Sequence[torch.device] = (), **options: Any
    ) -> None:
        super().__init__(**options)
        self.parallel_devices = list(parallel_devices)
        self.net: nn.Module | None = None  # the network whose forward is replaced

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    def setup(self, trainer: Trainer) -> None:
        """Let the network split its batches. Raise UserError if it is compiled."""
        model: Any = self.lightning_module
        if isinstance(model, BaseModule) and model.compile_net:
            raise UserError(
                "dp cannot split a compiled network: leave model.compile_net out"
            )
        super().setup(trainer)
        if len(self.parallel_devices) > 1:
            net = model.get_submodule("net")
            net.forward = functools.partial(split_forward, net, self.parallel_devices)
            self.net = net

    def teardown(self) -> None:
        if self.net is not None:
            del self.net.forward  # the forward of the class is back
            self.net = None
        super().teardown()


def split_forward(
    net: nn.Module, devices: list[torch.device], *args: Any, **kwargs: Any
) -> Any:
    """Return the outputs of `net` for a batch, on the first device.

    args, kwargs: The arguments of forward. Their tensors are split along the samples,
        and each device computes its part.
    """
    # torch's parallel_apply passes on neither autocast's dtype nor inference mode
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
