"""A resume within an epoch: what the hooks of the epoch's start have set is there again,
and each torch.Generator of the user goes on. The weights are those of an uninterrupted
run.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from paths import argv, script
from stops import Terminate
from torch import nn
from written import checkpoint, equal, weights

HERE = "test_epoch_start"


class Scaled(Classifier):
    """Its loss has a factor, which subclasses set."""

    factor = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


class Curriculum(Scaled):
    """Draws an unsaved factor in each epoch, and changes what the checkpoint holds: a
    buffer, weights, and options of the optimizer."""

    num_epochs = 0

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.register_buffer("count", torch.zeros(()))

    def on_train_start(self):
        self.base = float(torch.rand(()))

    def on_train_epoch_start(self):
        self.factor = self.base + self.current_epoch + random.random()
        self.factor += float(torch.rand(())) + np.random.rand()
        self.count += 1
        self.log("factor", self.factor)
        self.num_epochs += 1
        self.optimizers().param_groups[0]["lr"] *= 0.7
        with torch.no_grad():
            self.net.layers[-1].bias.mul_(0.5)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["num_epochs"] = self.num_epochs

    def on_load_checkpoint(self, checkpoint):
        self.num_epochs = checkpoint["num_epochs"]


class SetsFactor(Callback):
    """Sets the factor of the module, and has a state."""

    def __init__(self):
        self.factors = []

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.factor = 1.0 + trainer.current_epoch + float(torch.rand(()))
        self.factors.append(pl_module.factor)

    def state_dict(self):
        return {"factors": self.factors}

    def load_state_dict(self, state_dict):
        self.factors = state_dict["factors"]


class Noise(nn.Module):
    """Adds noise of its own generators."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.mt19937 = np.random.Generator(np.random.MT19937(5))
        self.pcg64 = np.random.default_rng(5)

    def forward(self, x):
        scale = self.python.random() + self.mt19937.random() + self.pcg64.random()
        return x + scale * torch.randn(x.shape, generator=self.generator)


class OwnGenerators(Scaled):
    """Has a generator in a layer, and one that the start makes."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.net.layers.insert(0, Noise())

    def on_train_start(self):
        self.late = torch.Generator().manual_seed(4)

    def training_step(self, batch, batch_idx):
        self.factor = float(torch.rand((), generator=self.late))
        return super().training_step(batch, batch_idx)


class Augmented(SyntheticImages):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.generator = torch.Generator().manual_seed(9)

    def augment(self, inputs):
        return inputs + torch.randint(9, inputs.shape, generator=self.generator)


class Accumulates(GradientAccumulationScheduler):
    def __init__(self):
        super().__init__({1: 4})


CASES = {
    "module": f"--model {HERE}.Curriculum",
    "callback": f"--model {HERE}.Scaled --trainer.callbacks {HERE}.SetsFactor",
    "accumulation": f"--trainer.callbacks {HERE}.Accumulates",
    "generators": f"--model {HERE}.OwnGenerators --data {HERE}.Augmented",
}


@pytest.mark.parametrize(
    "case",
    [
        "generators",
        *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][:-1]),
    ],
)
@pytest.mark.linux
def test_a_resume_within_an_epoch_ends_with_the_weights_of_an_uninterrupted_run(
    train, trained, tmp_path, monkeypatch, case
):
    flags = CASES[case] + " --trainer.max_epochs 3 --trainer.callbacks+ stops.Terminate"
    whole, _ = trained(flags)
    monkeypatch.setattr(Terminate, "at_batch", 7)
    with pytest.raises(SystemExit):
        train(flags)
    monkeypatch.setattr(Terminate, "at_batch", None)
    folder = tmp_path / "tiny" / "version_0"
    assert checkpoint(folder)["global_step"] in (19 + 8, 19 + 2)
    script("train").main(argv("--ckpt_path", folder / "checkpoints" / "last.ckpt"))
    assert equal(weights(folder), weights(whole))
    found, expected = checkpoint(folder), checkpoint(whole)
    assert found.get("num_epochs") == expected.get("num_epochs")
    key = "SetsFactor"
    assert found["callbacks"].get(key) == expected["callbacks"].get(key)
