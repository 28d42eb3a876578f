"""Activation functions by name."""

from torch import nn
from torch.nn.modules import activation

_CLASSES = {name.lower(): getattr(activation, name) for name in activation.__all__} | {
    "none": nn.Identity
}


def make_activation(name: str) -> nn.Module:
    """An activation of torch.nn by its class name, in any case ("ReLU", "relu", "GELU"), or "none"
    for the identity.

    Raises ValueError for any other name and for activations that need arguments.
    """
    try:
        return _CLASSES[name.lower()]()
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"activation {name!r}: none of torch.nn without arguments; try relu, gelu or none"
        ) from error
