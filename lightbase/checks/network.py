"""What a network does wrong although it runs: layers that are not registered, and
outputs that are random, or depend on other samples, in eval mode."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightbase.config.errors import first_line

TOLERANCE = 1e-3
"""Outputs differ if they do by more than this part of the largest one."""

CHANGES = (
    "its outputs change from call to call in eval mode: look for functional.dropout "
    "without training=self.training, layers made in forward, random numbers, and "
    "values kept from the last call"
)

DEPENDS = (
    "its outputs for a sample depend on the other samples of the batch, in eval mode, "
    "too: look for batch_first, softmax(0), view, and BatchNorm without running "
    "statistics"
)


def check_network(net: nn.Module, inputs: Tensor, outputs: Any) -> Iterator[str]:
    """Yield a line if layers that run are not registered, unless they are frozen. Yield
    one if a network in eval mode fails with a single sample, gives other outputs for
    the same samples, or lets a sample change the outputs of another one.

    inputs, outputs: Of two samples, (2, ...).
    """
    running: set[nn.Module] = set()
    try:
        with register_module_forward_pre_hook(lambda layer, _: running.add(layer)):
            alone = net(inputs[1:])
    except Exception as error:
        yield f"it fails with a single sample in eval mode: {first_line(error)}"
        return
    weights = {x for layer in running for x in layer.parameters() if x.requires_grad}
    if hidden := weights - {*net.parameters()}:
        yield (
            f"{len(hidden)} weights of layers that run are not trained, saved or moved "
            "to a GPU: make layers in __init__, and use nn.ModuleList or nn.ModuleDict "
            "in place of a list or dict"
        )
    if isinstance(outputs, Tensor) and outputs.shape == (2, *alone.shape):
        yield "its outputs for a single sample lose a dimension: write squeeze(1)"
    # other outputs may be lists of boxes, or similarities of all samples
    if isinstance(outputs, Tensor) and outputs.shape == (2, *alone.shape[1:]):
        outputs = outputs.double()
        for samples, text in ((inputs, CHANGES), (inputs[[1, 1]], DEPENDS)):
            second = net(samples)[1].double()
            difference = (second - outputs[1]).abs().max()  # NaN is none
            if difference > TOLERANCE * outputs.abs().max():
                yield text
                return
