"""--model.freeze: what is frozen stays bit for bit, over evaluation, resume, averaging
and decay."""

import pytest
import torch
from example.classifier import Classifier
from stops import Terminate
from torch import nn
from written import equal, weights

from lightbase.model.transfer import freeze_parameters


class Normed(nn.Module):
    """With BatchNorm and Dropout, whose behaviour depends on the mode."""

    def __init__(self, num_classes: int = 4):
        super().__init__()
        convolution = nn.Conv2d(3, 4, 3, stride=2)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, num_classes))

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).mean((2, 3)))


class WatchesModes(Classifier):
    """Fails where a step finds a frozen part in training mode, or another one in eval
    mode; calls train() itself."""

    def training_step(self, batch, batch_idx):
        assert not any(module.training for module in self.net.stem.modules())
        assert all(module.training for module in self.net.head.modules())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.train()


NET = "--model test_frozen.WatchesModes --model.net test_frozen.Normed"
NET += " --model.freeze stem"
DECAY = "--model.optimizer AdamW --model.optimizer_args.weight_decay 0.5"
AVERAGING = "--trainer.callbacks lightning.pytorch.callbacks.EMAWeightAveraging"


def assert_frozen(found, tolerance=0):
    """The stem alone is as it was built."""
    torch.manual_seed(42)
    for name, value in Normed().state_dict().items():
        is_same = torch.allclose(found[f"net.{name}"], value, tolerance, tolerance)
        assert is_same == name.startswith("stem."), name


def test_the_frozen_part_stays_and_a_resume_ends_with_the_same_weights(
    train, tmp_path, monkeypatch, capsys
):
    train(NET, DECAY, "--name whole")
    assert capsys.readouterr().out.count("Frozen: 120 of 140 parameters\n") == 1
    expected = weights(tmp_path / "whole" / "version_0")
    assert_frozen(expected)
    monkeypatch.setattr(Terminate, "at_batch", 11)
    with pytest.raises(SystemExit):
        train(NET, DECAY, "--trainer.callbacks stops.Terminate")
    train("--ckpt_path last --trainer.max_epochs 2")
    assert equal(weights(tmp_path / "tiny" / "version_0"), expected)


def test_an_average_keeps_the_frozen_part(train, tmp_path):
    train(NET, AVERAGING, "--trainer.val_check_interval 0.5")
    # torch's average of two equal numbers is one up to rounding
    assert_frozen(weights(tmp_path / "tiny" / "version_0"), tolerance=1e-6)


@pytest.mark.parametrize(
    ("names", "frozen", "in_eval"),
    [
        ("head.[1].*", "head.1.weight head.1.bias", "head head.0 head.1"),
        (
            "norms_and_biases stem.0",
            "stem.0.weight stem.0.bias stem.1.weight stem.1.bias head.1.bias",
            "stem stem.0 stem.1 stem.2",
        ),
    ],
)
def test_names_are_beginnings_or_patterns(names, frozen, in_eval):
    model = Classifier(Normed(), num_classes=4)
    freeze_parameters(model, names.split())
    parameters, modules = model.net.named_parameters(), model.net.named_modules()
    found = {name for name, value in parameters if not value.requires_grad}
    assert found == {*frozen.split()}
    found = {name for name, module in modules if not module.training}
    assert found == {*in_eval.split()}
