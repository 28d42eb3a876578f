"""A forward of your own is what your steps train, validate, test and predict with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PACKAGE
from small import Numbers, Points
from torch import Tensor, nn

import lightbase

DATA = {"Classifier": Points, "Regressor": Numbers}


def with_own_forward(name: str) -> Any:
    """A subclass whose forward is not its network alone."""
    base = getattr(pytest.importorskip(f"{PACKAGE}.{name.lower()}"), name)

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls.append(
            (self.trainer.state.stage if self._trainer else None, self.training)
        )
        return self.net(x) - 3 * x[:, : self.net.out_features]

    return type(f"Own{name}", (base,), {"forward": forward, "calls": []})


def model_of(name: str) -> Any:
    num_outputs = 2 if name == "Classifier" else 1
    options: dict[str, Any] = {"num_classes": 2} if name == "Classifier" else {}
    return with_own_forward(name)(nn.Linear(10, num_outputs), lr=0.02, **options)


@pytest.mark.parametrize("name", DATA)
def test_each_step_computes_by_the_own_forward(name: str) -> None:
    model = model_of(name)
    inputs, targets = DATA[name]().load("test")
    outputs = model(inputs)
    assert not torch.equal(outputs, model.net(inputs))
    batch = inputs, targets
    loss = model.criterion(
        outputs.view_as(targets) if name == "Regressor" else outputs, targets
    )
    torch.testing.assert_close(model.training_step(batch, 0), loss)
    for step in (model.validation_step, model.test_step):
        torch.testing.assert_close(step(batch, 0).view_as(outputs), outputs)
    predicted = outputs.softmax(1) if name == "Classifier" else outputs
    torch.testing.assert_close(model.predict_step(batch, 0), predicted)


@pytest.mark.parametrize("name", DATA)
def test_a_training_and_its_test_call_the_own_forward(
    name: str, tmp_path: Path
) -> None:
    model = model_of(name)
    metrics = lightbase.train(
        model,
        DATA[name](batch_size=10),
        default_root_dir=tmp_path,
        name="own",
        max_epochs=2,
        accelerator="cpu",
        log_every_n_steps=1,
        figures_every_n_epochs=0,
        device_monitor=False,
        step_timer=False,
    )
    stages = {stage.value for stage, _ in model.calls if stage}
    assert {"train", "validate", "test"} <= stages, stages
    assert metrics["test/loss"] > 0
