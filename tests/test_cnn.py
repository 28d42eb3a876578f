import pytest
import torch
from torch import nn

CIFAR10CNN = pytest.importorskip("project.models.cnn").CIFAR10CNN


def num_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_size_and_shape() -> None:
    net = CIFAR10CNN()
    assert net(torch.rand(4, 3, 32, 32)).shape == (4, 10)
    assert num_parameters(net) == 145_578
    assert CIFAR10CNN(num_classes=7, in_channels=1)(torch.rand(4, 1, 32, 32)).shape == (
        4,
        7,
    )


def test_an_activation_follows_each_layer_but_the_last_if_it_is_named() -> None:
    assert not any(isinstance(module, nn.ReLU) for module in CIFAR10CNN().modules())
    net = CIFAR10CNN(activation="ReLU")
    assert sum(isinstance(module, nn.ReLU) for module in net.modules()) == 4
    assert num_parameters(net) == 145_578
    reference = CIFAR10CNN()
    reference.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, 32, 32)
    assert not torch.allclose(net(x), reference(x))


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="num_classes 0"):
        CIFAR10CNN(num_classes=0)
