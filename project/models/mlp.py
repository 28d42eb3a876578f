"""A multi-layer perceptron."""

import itertools

from torch import Tensor, nn

from project.models import make_activation


class MLP(nn.Module):
    """Flatten, then linear layers with an activation between them.

    Input (N, ...) with sizes[0] values a sample, output (N, sizes[-1]) logits.

    Args:
        sizes: Units of each layer, input first, classes last. [784, 128, 10] is the
            MNIST network (101,770 parameters), [10, 5, 2] the small net (67).
        activation: An activation of torch.nn by name, such as "relu", "gelu" or "tanh".
    """

    def __init__(self, sizes: list[int], activation: str = "relu") -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(
                f"sizes {sizes}: give two sizes or more over 0, such as [784, 10]"
            )
        layers: list[nn.Module] = [nn.Flatten()]
        for num_in, num_out in itertools.pairwise(sizes):
            layers += [nn.Linear(num_in, num_out), make_activation(activation)]
        self.layers = nn.Sequential(*layers[:-1])  # no activation after the last layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
