"""A forward of your own is what your steps train, validate, test and predict with.

Each step has to give what it gives for a network that computes the same. So you may
change the steps.
"""

from typing import Any

import pytest
import torch
from samples import Numbers, Points
from torch import Tensor, nn

# your step may call self.log, which warns without a Trainer
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to .self.log")


class Linear(nn.Linear):
    """A network that computes what the model's own forward computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 3 * x[:, : self.out_features]


@pytest.fixture(params=["classifier", "regressor"])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A model whose forward is not its network alone, one whose network computes the
    same, and their data."""

    class Own(request.getfixturevalue(request.param)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) - 3 * x[:, : self.net.out_features]

    base = Own.__base__
    if request.param == "regressor":
        net, same = nn.Linear(10, 1), Linear(10, 1)
        options, data = {}, Numbers()
    else:
        net, same = nn.Linear(10, 2), Linear(10, 2)
        options, data = {"criterion": nn.CrossEntropyLoss(), "num_classes": 2}, Points()
    same.load_state_dict(net.state_dict())
    return Own(net, lr=0.02, **options), base(same, lr=0.02, **options), data


@pytest.mark.parametrize("step", ["training", "validation", "test", "predict"])
def test_each_step_computes_by_the_own_forward(step: str, models) -> None:
    own, same, data = models
    results = []
    for model in (own, same):
        torch.manual_seed(0)  # your step may draw random numbers
        results.append(getattr(model, f"{step}_step")(data.load("test"), 0))
    torch.testing.assert_close(*results)
