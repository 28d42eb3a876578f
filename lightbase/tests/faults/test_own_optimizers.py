"""Modules that build their own optimizers end, after stops and resumes, as if nothing
had happened.

pytest -m "" -n 0 lightbase/tests/faults/test_own_optimizers.py   # each module
"""

import signal
from pathlib import Path

import pytest
import torch
import yaml
from example.classifier import Classifier
from lightning import Callback, LightningModule
from paths import TINY
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler
from written import curves, equal, weights

Stops = list[tuple[int, int, int]]
CASES = ["Plain", pytest.param("Adversarial", marks=pytest.mark.slow)]


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9)
        # after the first epoch none is good enough
        scheduler = lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=1000, threshold_mode="abs"
        )
        config = {"scheduler": scheduler, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Plain(LightningModule):
    """A plain LightningModule with dropout. Its schedule watches what the module logs
    last of all in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(192, 4))

    def _step(self, batch, stage):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(f"{stage}/loss", loss)
        return loss

    def training_step(self, batch, batch_idx):
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._step(batch, "val")

    def on_train_epoch_end(self):
        self.log("waiting", 1.0 + self.current_epoch)

    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=0.02)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        config = {"scheduler": scheduler, "monitor": "waiting"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Adversarial(Plain):
    """Two networks, two optimizers, each with its schedule, all stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(8, 192)
        self.critic = nn.Linear(192, 1)

    def training_step(self, batch, batch_idx):
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        real, fake = batch[0].flatten(1), self.generator(torch.randn(len(batch[0]), 8))
        difference = self.critic(fake.detach()).mean() - self.critic(real).mean()
        losses = (-self.critic(fake).mean(), difference)
        optimizers = self.optimizers()
        schedulers = self.lr_schedulers()
        for optimizer, scheduler, loss in zip(
            optimizers, schedulers, losses, strict=True
        ):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
        self.log("train/loss", difference.detach())

    def configure_optimizers(self):
        optimizers = [
            Adam(self.generator.parameters(), lr=0.01),
            SGD(self.critic.parameters(), lr=0.01, momentum=0.9),
        ]
        return optimizers, [lr_scheduler.ExponentialLR(x, 0.95) for x in optimizers]


class Stop(Callback):
    """Ends the training after a batch, by a signal or by an error.

    at: The epoch, the batch, and the number of the signal; 0 is an error.
    """

    at = (-1, 0, 0)

    def on_train_batch_end(self, trainer, pl_module, *_):
        epoch, batch, number = Stop.at
        if (trainer.current_epoch, trainer.fit_loop.batch_idx) != (epoch, batch):
            return
        if not number:
            raise ArithmeticError
        signal.raise_signal(number)


def config_of(module, folder):
    """Return the path of a config that trains a module of this file."""
    content = yaml.safe_load(Path(TINY).read_text())
    net = content["model"]["net"]
    content["model"] = {"class_path": f"test_own_optimizers.{module}"}
    if module == "Plateau":
        content["model"]["init_args"] = {"net": net}
    content["data"]["init_args"]["num_train"] = 180  # 10 batches
    content["trainer"] |= {
        "max_epochs": 4,
        "log_every_n_steps": 1,
        "callbacks": [{"class_path": "test_own_optimizers.Stop"}],
    }
    path = folder / f"{module}.yaml"
    path.write_text(yaml.safe_dump(content | {"monitor": "val/loss"}))
    return str(path)


def rates_with_and_without(train, folder, module, stops, *flags):
    """Train a run as a whole, and another one that is stopped and resumed by the same
    command. Return the rates of the steps; all is equal."""
    config = config_of(module, folder)
    train(*flags, "--name whole", config=config)
    for Stop.at in stops:
        with pytest.raises((SystemExit, ArithmeticError)):
            train(*flags, config=config)
        flags = (*flags, "--ckpt_path last")
    Stop.at = (-1, 0, 0)
    train(*flags, config=config)
    runs = [folder / name / "version_0" for name in ("tiny", "whole")]
    assert equal(*map(weights, runs))
    resumed, expected = map(curves, runs)
    for name in ("lr", "train/loss", "val/loss"):
        assert resumed[name] == expected[name]
    return [rate for _, rate in expected["lr"]]


@pytest.mark.linux
@pytest.mark.parametrize("module", CASES)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(train, tmp_path, module):
    stops = [(1, 3, signal.SIGINT), (1, 6, signal.SIGTERM), (3, 4, 0)]
    rates = rates_with_and_without(train, tmp_path, module, stops)
    assert len({*rates}) > 1


@pytest.mark.linux
def test_a_plateau_that_is_seen_in_mid_epoch_counts_after_a_stop_as_well(
    train, tmp_path
):
    # nothing is validated between the stop and the epoch's end
    flags = "--trainer.val_check_interval 0.7"
    # names that the subclass does not use are not tried
    flags += " --model.optimizer mine --model.scheduler yours"
    stops = [(1, 8, signal.SIGTERM)]
    found = rates_with_and_without(train, tmp_path, "Plateau", stops, flags)
    rates = [0.05] * 20 + [0.005] * 10 + [0.0005] * 10  # as Lightning steps it
    assert found == pytest.approx(rates)
