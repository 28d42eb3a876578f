"""A forward of your own is what your steps train, validate, test and predict with."""

from typing import Any

import pytest
import torch
from samples import Numbers, Points
from torch import Tensor, nn


@pytest.fixture(params=["classifier", "regressor"])
def own(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model whose forward is not its network alone, and its data."""

    class Own(request.getfixturevalue(request.param)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) - 3 * x[:, : self.net.out_features]

    if request.param == "regressor":
        return Own(nn.Linear(10, 1), lr=0.02), Numbers()
    loss = nn.CrossEntropyLoss()
    model = Own(nn.Linear(10, 2), loss, num_classes=2, lr=0.02)
    return model, Points()


def test_each_step_computes_by_the_own_forward(own) -> None:
    model, data = own
    inputs, targets = batch = data.load("test")
    outputs = model(inputs).squeeze(1)  # (N, 2), or (N,)
    loss = model.criterion(outputs, targets)
    torch.testing.assert_close(model.training_step(batch, 0), loss)
    for step in (model.validation_step, model.test_step):
        torch.testing.assert_close(step(batch, 0).view_as(outputs), outputs)
    predicted = model.predict_step(batch, 0)
    if outputs.dim() == 2:
        outputs = outputs.softmax(1)
    torch.testing.assert_close(predicted.view_as(outputs), outputs)
