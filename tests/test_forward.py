"""A forward of your own is what your steps train, validate, test and predict with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Numbers, Points
from torch import Tensor, nn

import lightbase


def with_own_forward(base: Any) -> Any:
    """Return a subclass whose forward is not its network alone, and notes its calls."""

    class Own(base):  # type: ignore[misc]
        stages: set[str] = set()

        def forward(self, x: Tensor) -> Tensor:
            if self._trainer:
                self.stages.add(self.trainer.state.stage.value)
            return self.net(x) - 3 * x[:, : self.net.out_features]

    return Own


@pytest.fixture(params=["classifier", "regressor"])
def own(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model with a forward of its own, and its data."""
    base = with_own_forward(request.getfixturevalue(request.param))
    if request.param == "regressor":
        return base(nn.Linear(10, 1), lr=0.02), Numbers(batch_size=50)
    net, loss = nn.Linear(10, 2), nn.CrossEntropyLoss()
    return base(net, loss, num_classes=2, lr=0.02), Points(batch_size=100)


def test_each_step_computes_by_the_own_forward(own: tuple[Any, Any]) -> None:
    model, data = own
    inputs, targets = data.load("test")
    outputs = model(inputs).squeeze(1)  # (N, 2), or (N,)
    loss = model.criterion(outputs, targets)
    torch.testing.assert_close(model.training_step((inputs, targets), 0), loss)
    for step in (model.validation_step, model.test_step):
        result = step((inputs, targets), 0)
        torch.testing.assert_close(result.view_as(outputs), outputs)
    predicted = model.predict_step((inputs, targets), 0)
    if outputs.dim() == 2:
        outputs = outputs.softmax(1)
    torch.testing.assert_close(predicted.view_as(outputs), outputs)


def test_a_training_calls_the_own_forward(own: tuple[Any, Any], tmp_path: Path) -> None:
    model, data = own
    metrics = lightbase.train(
        model,
        data,
        default_root_dir=tmp_path,
        name="own",
        max_epochs=2,
        accelerator="cpu",
        log_every_n_steps=1,
        figures_every_n_epochs=0,
        device_monitor=False,
        step_timer=False,
    )
    assert {"train", "validate", "test"} <= model.stages
    assert metrics["test/loss"] > 0
