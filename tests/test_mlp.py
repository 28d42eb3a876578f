import pytest
import torch

MLP = pytest.importorskip("project.models.mlp").MLP


@pytest.mark.parametrize(
    ("sizes", "shape", "parameters"),
    [([784, 128, 10], (1, 28, 28), 101_770), ([10, 5, 2], (10,), 67)],
)
def test_size_and_shape(sizes, shape, parameters) -> None:
    net = MLP(sizes)
    assert net(torch.rand(4, *shape)).shape == (4, sizes[-1])
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters


def test_without_hidden_activation_it_is_linear() -> None:
    net = MLP([5, 7, 3], activation="none")
    a, b = torch.rand(2, 1, 5)
    torch.testing.assert_close(net(a) + net(b) - net(torch.zeros(1, 5)), net(a + b))
    relu = MLP([5, 7, 3])
    relu.load_state_dict(net.state_dict(), strict=True)
    assert not torch.allclose(relu(10 * a), net(10 * a))
