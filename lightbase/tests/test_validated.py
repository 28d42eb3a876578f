"""best.ckpt holds the weights that a validation has measured. A run ends with an error
if something changes them in between."""

import pytest
import torch
from example.classifier import Classifier
from lightning import Callback
from paths import script
from written import checkpoint_file, refused

ME = "--trainer.callbacks test_validated"
LIGHTNING = "--trainer.callbacks lightning.pytorch.callbacks"
ONE_EPOCH = "--trainer.max_epochs 1"


@torch.no_grad()
def shrink(tensors):
    for tensor in tensors:
        tensor.mul_(0.9)


class AtEpochEnd(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        shrink([*pl_module.parameters()][-1:])


class AtValidationEnd(Callback):
    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            shrink(pl_module.parameters())


class WhenSaved(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        weights = {name: x.clone() for name, x in checkpoint["state_dict"].items()}
        shrink(weights.values())
        checkpoint["state_dict"] = weights


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


PRUNING = f"{LIGHTNING}.ModelPruning --trainer.callbacks.amount 0.5"
PRUNING += " --trainer.callbacks.pruning_fn l1_unstructured"
STOPPING = f"{LIGHTNING}.EarlyStopping --trainer.callbacks.monitor val/loss"
SHRINKS = "--model test_validated.ModuleShrinks"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("AtEpochEnd", f"{ME}.AtEpochEnd"),
        ("WhenSaved", f"{ME}.WhenSaved --trainer.val_check_interval 5"),
        ("ModelPruning", PRUNING),
        # a callback that only stops is not named
        ("ModuleShrinks", f"{SHRINKS} {STOPPING}"),
        pytest.param(
            "AtValidationEnd", f"{ME}.AtValidationEnd", marks=pytest.mark.slow
        ),
        pytest.param(
            "WhenSaved",
            f"{ME}.WhenSaved --trainer.precision 64-true",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_that_change_after_their_validation_end_the_run(
    train, tmp_path, capsys, name, flags
):
    run = lambda: train(ONE_EPOCH, flags)  # noqa: E731
    error = refused(capsys, tmp_path, run, status=1)
    assert f"{name} changes the weights between a validation and best.ckpt" in error
    assert "EarlyStopping" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "allowed",
    [
        f"{LIGHTNING}.EMAWeightAveraging --trainer.callbacks.decay=0.9",
        f"{ME}.UsersAverage",
        f"{ME}.AtEpochEnd --monitor null",
    ],
)
def test_what_is_validated_is_what_is_tested_again(train, tmp_path, allowed):
    metrics = train(allowed)
    best = checkpoint_file(tmp_path / "tiny" / "version_0")
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-6)
