"""The strategy "dp": one process splits each batch over the GPUs of a machine.

docs/devices.md says when it is useful, and how to select it.
"""

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
