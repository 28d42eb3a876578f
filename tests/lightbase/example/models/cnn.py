"""The CIFAR-10 convolutional network."""

from torch import Tensor, nn

from example.models.activation import make_activation


class CIFAR10CNN(nn.Module):
    """Three 5x5 convolutions with max pooling, then two linear layers: 145,578 parameters with 10
    classes.

    The reference has no activation at all: max pooling is its only non-linearity. `activation` puts
    one of torch.nn by name, such as "relu", behind each convolution and the first linear layer.

    Input (N, in_channels, 32, 32) in [0, 1], output (N, num_classes) logits.
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, activation: str = "none"
    ) -> None:
        super().__init__()
        if min(num_classes, in_channels) < 1:
            raise ValueError(
                f"num_classes {num_classes} and in_channels {in_channels}: both are 1 or more"
            )

        def act() -> nn.Module:
            return make_activation(activation)

        self.features = nn.Sequential(
            *(
                nn.Conv2d(in_channels, 32, kernel_size=5, padding=2),
                act(),
                nn.MaxPool2d(2),
            ),  # (N, 32, 16, 16)
            *(nn.Conv2d(32, 32, kernel_size=5, padding=2), act(), nn.MaxPool2d(2)),  # (N, 32, 8, 8)
            *(nn.Conv2d(32, 64, kernel_size=5, padding=2), act(), nn.MaxPool2d(2)),  # (N, 64, 4, 4)
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(1024, 64), act(), nn.Linear(64, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
