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


@pytest.fixture
def own_classifier(classifier: Any) -> Any:
    net, loss = nn.Linear(10, 2), nn.CrossEntropyLoss()
    return with_own_forward(classifier)(net, loss, num_classes=2, lr=0.02)


@pytest.fixture
def own_regressor(regressor: Any) -> Any:
    return with_own_forward(regressor)(nn.Linear(10, 1), lr=0.02)


def check_steps(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compare the outputs of each step with the forward. Return the outputs."""
    outputs = model(inputs).squeeze(1)  # (N, 2), or (N,)
    loss = model.criterion(outputs, targets)
    torch.testing.assert_close(model.training_step((inputs, targets), 0), loss)
    for step in (model.validation_step, model.test_step):
        result = step((inputs, targets), 0)
        torch.testing.assert_close(result.view_as(outputs), outputs)
    return outputs


def test_each_step_of_the_classifier_computes_by_the_own_forward(
    own_classifier: Any,
) -> None:
    batch = Points().load("test")
    outputs = check_steps(own_classifier, *batch)
    predicted = own_classifier.predict_step(batch, 0)
    torch.testing.assert_close(predicted, outputs.softmax(1))


def test_each_step_of_the_regressor_computes_by_the_own_forward(
    own_regressor: Any,
) -> None:
    batch = Numbers().load("test")
    outputs = check_steps(own_regressor, *batch)
    predicted = own_regressor.predict_step(batch, 0).squeeze(1)
    torch.testing.assert_close(predicted, outputs)


def check_training(model: Any, data: Any, folder: Path) -> None:
    """Train and test, and look which stages have called the forward."""
    metrics = lightbase.train(
        model,
        data,
        default_root_dir=folder,
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


def test_a_training_of_the_classifier_calls_the_own_forward(
    own_classifier: Any, tmp_path: Path
) -> None:
    check_training(own_classifier, Points(batch_size=100), tmp_path)


def test_a_training_of_the_regressor_calls_the_own_forward(
    own_regressor: Any, tmp_path: Path
) -> None:
    check_training(own_regressor, Numbers(batch_size=50), tmp_path)
