"""A system that predicts numbers."""

import pytest
import torch
from example.models.mlp import MLP
from example.regressor import Regressor
from paths import argv, script

from lightbase.core.errors import UserError

FLAGS = argv(
    "--model example.regressor.Regressor --data small.Numbers --model.net.sizes [10,1]"
)


@pytest.mark.parametrize("column", ["true", "false"], ids=["N x 1", "N"])
def test_it_learns_numbers_and_evaluates_the_same(train, tmp_path, column):
    result = train(
        *FLAGS, "--data.column", column, "--trainer.max_epochs", 6, "--model.lr", 0.05
    )
    assert result["test/mae"] < 0.1  # 1.6 for those who always say 0
    assert result["test/loss"] < 0.02
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    found = script("evaluate").main(["--ckpt_path", str(path)])
    assert found == {
        name: value for name, value in result.items() if name.startswith("test/")
    }


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 2)])
def test_predictions_and_targets_are_compared_one_by_one(
    shape: tuple[int, ...],
) -> None:
    net = MLP([5, shape[1] if len(shape) > 1 else 1])
    model, x, y = Regressor(net), torch.rand(8, 5), torch.rand(shape)
    expected = (net(x).view(shape) - y).square().mean()
    assert model.training_step((x, y), 0).item() == pytest.approx(expected.item())
    assert model.validation_step((x, y), 0).shape == y.shape
    with pytest.raises(UserError):
        Regressor(MLP([5, 3])).training_step((x, y), 0)
