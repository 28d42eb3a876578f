"""best.ckpt holds the weights that a validation has measured. A run ends with an error
if something changes them in between."""

import pytest
import torch
from example.classifier import Classifier
from lightning import Callback
from lightning.pytorch.callbacks import WeightAveraging
from paths import fails, script
from written import checkpoint_file

ME = "--trainer.callbacks test_validated"
LIGHTNING = "--trainer.callbacks lightning.pytorch.callbacks"


@torch.no_grad()
def shrink(tensors):
    for tensor in tensors:
        tensor.mul_(0.9)


class AtEpochEnd(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        shrink([*pl_module.parameters()][-1:])


class WhenSaved(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        weights = {name: x.clone() for name, x in checkpoint["state_dict"].items()}
        shrink(weights.values())
        checkpoint["state_dict"] = weights


class ModuleShrinks(Classifier):
    def on_train_epoch_end(self):
        shrink(self.parameters())


class AveragesEpochs(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


@pytest.mark.parametrize(
    "flags",
    [
        f"{ME}.WhenSaved --trainer.val_check_interval 5 --trainer.precision 64-true",
        "--model test_validated.ModuleShrinks",
        # it validates weights before it averages
        f"{ME}.AveragesEpochs",
    ],
)
def test_weights_that_change_after_their_validation_end_the_run(
    train, tmp_path, capsys, flags
):
    error = fails(capsys, 1, lambda: train(flags))
    assert "changes the weights between a validation and best.ckpt" in error
    assert not [*tmp_path.rglob("best.ckpt")]


@pytest.mark.parametrize(
    "allowed",
    [
        f"{LIGHTNING}.EMAWeightAveraging --trainer.callbacks.decay=0.9",
        f"{ME}.AtEpochEnd --monitor null",
    ],
)
def test_what_is_validated_is_what_is_tested_again(train, tmp_path, allowed):
    metrics = train(allowed)
    best = checkpoint_file(tmp_path / "tiny" / "version_0")
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-6)
