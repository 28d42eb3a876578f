"""best.ckpt holds the weights that a validation has measured. A run ends with an error
if something changes them in between."""

import pytest
import torch
from example.classifier import Classifier
from lightning import Callback
from paths import argv, script
from written import checkpoint_file, refused

ME = "test_validated"
LIGHTNING = "lightning.pytorch.callbacks"
ONE_EPOCH = "--trainer.max_epochs 1"


@torch.no_grad()
def shrink(tensors):
    for tensor in tensors:
        tensor.mul_(0.9)


class AtEpochEnd(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        shrink(pl_module.parameters())


class AtValidationEpochEnd(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            shrink(pl_module.parameters())


class AtValidationEnd(Callback):
    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            shrink(pl_module.parameters())


class WhenSaved(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        weights = {name: x.clone() for name, x in checkpoint["state_dict"].items()}
        shrink(weights.values())
        checkpoint["state_dict"] = weights


class AfterBatches(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        shrink(pl_module.parameters())


class OneLayer(Callback):
    """Clips the last layer only."""

    @torch.no_grad()
    def on_train_epoch_end(self, trainer, pl_module):
        [*pl_module.parameters()][-1].clamp_(-0.01, 0.01)


class ModuleShrinks(Classifier):
    def on_train_epoch_end(self):
        shrink(self.parameters())


class UsersAverage(Callback):
    """Validates and saves a mean of the weights."""

    def on_fit_start(self, trainer, pl_module):
        self.mean = {name: x.clone() for name, x in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer, pl_module, *_):
        for name, x in pl_module.state_dict().items():
            self.mean[name].lerp_(x, 0.1)

    def on_validation_start(self, trainer, pl_module):
        self.trained = {name: x.clone() for name, x in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.mean)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.trained)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["state_dict"] = {name: x.clone() for name, x in self.mean.items()}


class ForgottenAverage(UsersAverage):
    """Validates the mean, and saves the others."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        pass


def flags_of(name: str) -> list[str]:
    """The flags of a class of this file, or of a callback of Lightning."""
    if name == "ModuleShrinks":
        return ["--model", f"{ME}.{name}"]
    if name == "ModelPruning":
        arguments = ["pruning_fn=l1_unstructured", "amount=0.5"]
        flags = [f"--trainer.callbacks.{argument}" for argument in arguments]
        return [f"--trainer.callbacks={LIGHTNING}.{name}", *flags]
    return [f"--trainer.callbacks={ME}.{name}"]


QUICK = ["AtEpochEnd", "WhenSaved", "ModelPruning"]
SLOW = ["AtValidationEpochEnd", "AtValidationEnd", "OneLayer"]
SLOW += ["ForgottenAverage", "ModuleShrinks"]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_weights_that_change_after_their_validation_end_the_run(
    train, tmp_path, capsys, name
):
    run = lambda: train(ONE_EPOCH, *flags_of(name))  # noqa: E731
    error = refused(capsys, tmp_path, run, status=1)
    assert f"{name} changes the weights between a validation and best.ckpt" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--trainer.val_check_interval 5", "--trainer.precision 64-true"]
)
def test_they_end_a_run_with_these_flags_too(train, tmp_path, capsys, flags):
    run = lambda: train(flags, ONE_EPOCH, *flags_of("WhenSaved"))  # noqa: E731
    assert "WhenSaved changes the weights" in refused(capsys, tmp_path, run, status=1)


def test_a_callback_that_only_stops_is_not_named(train, tmp_path, capsys):
    stops = f"--trainer.callbacks {LIGHTNING}.EarlyStopping"
    flags = (stops, "--trainer.callbacks.monitor val/loss", *flags_of("ModuleShrinks"))
    error = refused(capsys, tmp_path, lambda: train(ONE_EPOCH, *flags), status=1)
    assert "ModuleShrinks" in error
    assert "EarlyStopping" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "allowed",
    [
        f"--trainer.callbacks {LIGHTNING}.WeightAveraging",
        f"--trainer.callbacks {LIGHTNING}.EMAWeightAveraging "
        "--trainer.callbacks.decay=0.9",
        f"--trainer.callbacks {ME}.UsersAverage",
        f"--trainer.callbacks {ME}.AfterBatches",
        f"--trainer.callbacks {ME}.AtEpochEnd --monitor null",
    ],
)
def test_what_is_validated_is_what_is_tested_again(train, tmp_path, capsys, allowed):
    run = lambda: train(ONE_EPOCH, *flags_of("AtEpochEnd"))  # noqa: E731
    refused(capsys, tmp_path, run, status=1)
    metrics = train(allowed)
    best = checkpoint_file(tmp_path / "tiny" / "version_0")
    again = script("evaluate").main(argv("--ckpt_path", best))
    assert again["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-6)
