import pytest
import torch

CIFAR10CNN = pytest.importorskip("project.models.cnn").CIFAR10CNN


def test_size_and_shape() -> None:
    net = CIFAR10CNN()
    assert net(torch.rand(4, 3, 32, 32)).shape == (4, 10)
    assert sum(parameter.numel() for parameter in net.parameters()) == 145_578
    small = CIFAR10CNN(num_classes=7, in_channels=1)
    assert small(torch.rand(4, 1, 32, 32)).shape == (4, 7)
