"""The CIFAR-10 convolutional network."""

from torch import Tensor, nn

from project.models import make_activation


class CIFAR10CNN(nn.Module):
    """Three 5x5 convolutions with max pooling, then two linear layers: 145,578
    parameters with 10 classes.

    Input (N, in_channels, 32, 32) in [0, 1], output (N, num_classes) logits.

    Args:
        activation: Comes behind each convolution and the first linear layer, such as
            "relu" of torch.nn. The original network has none: max pooling is its only
            non-linearity.
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, activation: str = "none"
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for num_in, num_out in ((in_channels, 32), (32, 32), (32, 64)):
            convolution = nn.Conv2d(num_in, num_out, kernel_size=5, padding=2)
            layers += [convolution, make_activation(activation), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)  # (N, 64, 4, 4)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(1024, 64),
            make_activation(activation),
            nn.Linear(64, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
