"""A convolutional network for images of 32 x 32."""

from torch import Tensor, nn


class CIFAR10CNN(nn.Module):
    """Three convolutions with max pooling, then two linear layers."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for num_in, num_out in ((in_channels, 32), (32, 32), (32, 64)):
            layers += [
                nn.Conv2d(num_in, num_out, kernel_size=5, padding=2),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
