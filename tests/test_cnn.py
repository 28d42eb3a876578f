import pytest
import torch
from torch import nn

CIFAR10CNN = pytest.importorskip("project.models.cnn").CIFAR10CNN


def test_size_and_shape() -> None:
    net = CIFAR10CNN()
    assert net(torch.rand(4, 3, 32, 32)).shape == (4, 10)
    assert sum(parameter.numel() for parameter in net.parameters()) == 145_578
    small = CIFAR10CNN(num_classes=7, in_channels=1)
    assert small(torch.rand(4, 1, 32, 32)).shape == (4, 7)


def test_an_activation_follows_each_layer_but_the_last_if_it_is_named() -> None:
    net = CIFAR10CNN(activation="ReLU")
    assert sum(isinstance(module, nn.ReLU) for module in net.modules()) == 4
    reference = CIFAR10CNN()
    reference.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, 32, 32)
    assert not torch.allclose(net(x), reference(x))
