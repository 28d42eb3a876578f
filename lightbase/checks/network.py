"""What a network does wrong although it runs: layers that are not registered, and
outputs that are random, or depend on other samples, in eval mode.

Each check returns lines for what it finds.
"""

from typing import Any

from torch import Tensor, nn

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


def check_layers(net: nn.Module, running: set[nn.Module]) -> list[str]:
    """Return a line for each class of layers that run and are not registered, because
    they are in a list or dict. Frozen layers may be hidden on purpose.

    running: All layers that ran.
    """
    registered = {*net.parameters()}
    hidden = {
        type(layer).__name__
        for layer in running
        for x in layer.parameters()
        if x.requires_grad and x not in registered
    }
    return [
        f"a {name} that runs is not trained, saved or moved: make it in __init__, and "
        "use nn.ModuleList or nn.ModuleDict in place of a list or dict"
        for name in sorted(hidden)
    ]


def check_outputs(net: nn.Module, inputs: Tensor, outputs: Any) -> list[str]:
    """Return a line if a network in eval mode fails with a single sample, gives other
    outputs for the same samples, or lets a sample change the outputs of another one.

    inputs, outputs: Of two samples, (2, ...).
    """
    try:
        alone = net(inputs[1:])
    except Exception as error:
        return [f"it fails with a single sample in eval mode: {first_line(error)}"]
    # other outputs may be lists of boxes, or similarities of all samples
    if isinstance(outputs, Tensor) and outputs.shape == (2, *alone.shape[1:]):
        outputs = outputs.double()
        for samples, text in ((inputs, CHANGES), (inputs[[1, 1]], DEPENDS)):
            difference = (net(samples)[1] - outputs[1]).abs().max()  # NaN is none
            if difference > TOLERANCE * outputs.abs().max():
                return [text]
    return []
