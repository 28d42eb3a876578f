"""A multi-layer perceptron."""

import itertools

from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """Flatten, then linear layers with an activation between them. sizes: input
    first."""

    def __init__(self, sizes: list[int], activation: str = "relu") -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(
                f"sizes {sizes}: give an input and an output size, such as [784, 10]"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: try {', '.join(ACTIVATIONS)}")
        self.sizes, self.activation = sizes, activation
        layers: list[nn.Module] = [nn.Flatten()]
        for num_in, num_out in itertools.pairwise(sizes):
            layers += [nn.Linear(num_in, num_out), ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
