"""Networks in plain torch. A YAML names them by class path:
`project.models.cnn.CIFAR10CNN`."""

from torch import nn
from torch.nn.modules import activation

ACTIVATIONS = {name.lower(): name for name in activation.__all__}


def make_activation(name: str) -> nn.Module:
    """An activation of torch.nn by name, in any case: "ReLU", "relu"; "none" is the
    identity."""
    if name.lower() == "none":
        return nn.Identity()
    if name.lower() not in ACTIVATIONS:
        raise ValueError(
            f"activation {name!r} is not in torch.nn; try relu, gelu or none"
        )
    return getattr(nn, ACTIVATIONS[name.lower()])()
