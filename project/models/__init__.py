"""Networks in plain torch. A YAML names them by class path:
`project.models.cnn.CIFAR10CNN`."""

from torch import nn
from torch.nn.modules import activation

ACTIVATIONS = {name.lower(): name for name in activation.__all__}
ACTIVATIONS["none"] = "Identity"


def make_activation(name: str) -> nn.Module:
    """Return an activation of torch.nn by name, in any case: "ReLU" or "relu". "none"
    is the identity. Raise ValueError for any other name."""
    class_name = ACTIVATIONS.get(name.lower())
    if class_name is None:
        raise ValueError(
            f"activation {name!r} is not in torch.nn; try relu, gelu or none"
        )
    return getattr(nn, class_name)()
