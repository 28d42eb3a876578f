"""A system that predicts numbers."""

import pytest
import torch
from example.models.mlp import MLP
from example.regressor import Regressor
from paths import script
from written import checkpoint_file

from lightbase.config.errors import UserError


def test_it_learns_numbers_and_evaluates_the_same(train, tmp_path):
    flags = "--model example.regressor.Regressor --data small.Numbers --model.lr 0.05"
    flags += " --model.net.sizes [10,1] --trainer.max_epochs 6 --data.column true"
    result = train(flags)
    assert result["test/mae"] < 0.1  # 1.6 for those who always say 0
    best = checkpoint_file(tmp_path / "tiny" / "version_0")
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again.items() <= result.items()


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 2)])
def test_predictions_and_targets_are_compared_one_by_one(shape) -> None:
    x, y = torch.rand(8, 5), torch.rand(shape)
    net = MLP([5, y[0].numel()])
    model = Regressor(net)
    expected = (net(x).view(shape) - y).square().mean()
    assert model.training_step((x, y), 0).item() == pytest.approx(expected.item())
    with pytest.raises(UserError):
        Regressor(MLP([5, 3])).training_step((x, y), 0)
