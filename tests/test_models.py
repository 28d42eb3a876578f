import pytest
import torch
from torch import nn

from project.models.cnn import CIFAR10CNN
from project.models.mlp import MLP


def num_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(
    ("net", "shape", "parameters", "outputs"),
    [
        (CIFAR10CNN(), (3, 32, 32), 145_578, 10),
        (CIFAR10CNN(num_classes=7, in_channels=1), (1, 32, 32), None, 7),
        (MLP([784, 128, 10]), (1, 28, 28), 101_770, 10),
        (MLP([10, 5, 2]), (10,), 67, 2),
        (MLP([6, 3]), (2, 3), 21, 3),
    ],
)
def test_size_and_shape(net: nn.Module, shape: tuple[int, ...], parameters: int | None, outputs: int) -> None:
    assert net(torch.rand(4, *shape)).shape == (4, outputs)
    if parameters is not None:
        assert num_parameters(net) == parameters


def test_the_reference_cnn_has_no_activation_and_activation_adds_one_behind_each_layer_but_the_last() -> None:
    assert not any(isinstance(module, nn.ReLU) for module in CIFAR10CNN().modules())
    net = CIFAR10CNN(activation="ReLU")
    assert sum(isinstance(module, nn.ReLU) for module in net.modules()) == 4
    assert num_parameters(net) == 145_578
    reference = CIFAR10CNN()
    reference.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, 32, 32)
    assert not torch.allclose(net(x), reference(x))


def test_without_hidden_activation_the_mlp_is_linear() -> None:
    net = MLP([5, 7, 3], activation="none")
    a, b = torch.rand(2, 1, 5)
    torch.testing.assert_close(net(a) + net(b) - net(torch.zeros(1, 5)), net(a + b))
    relu = MLP([5, 7, 3])
    relu.load_state_dict(net.state_dict(), strict=True)
    assert not torch.allclose(relu(10 * a), net(10 * a))


@pytest.mark.parametrize("sizes", [[], [784], [784, 0, 10], [784, -1]])
def test_impossible_sizes(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes"):
        MLP(sizes)


@pytest.mark.parametrize("name", ["foo", "MultiheadAttention", ""])
def test_impossible_activation(name: str) -> None:
    with pytest.raises(ValueError, match="activation"):
        MLP([2, 2, 2], activation=name)
