"""A system that predicts numbers."""

import pytest
import torch
from example.models.mlp import MLP
from example.regressor import Regressor

from lightbase.config.errors import UserError


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 2)])
def test_predictions_and_targets_are_compared_one_by_one(shape) -> None:
    x, y = torch.rand(8, 5), torch.rand(shape)
    net = MLP([5, y[0].numel()])
    model = Regressor(net)
    expected = (net(x).view(shape) - y).square().mean()
    assert model.training_step((x, y), 0).item() == pytest.approx(expected.item())
    with pytest.raises(UserError):
        Regressor(MLP([5, 3])).training_step((x, y), 0)
