"""--model.freeze: what is frozen stays bit for bit, over evaluation, resume, averaging
and decay."""

from typing import Any

import pytest
import torch
from example.classifier import Classifier
from stops import Terminate
from torch import Tensor, nn
from written import equal, weights

from lightbase.core.errors import UserError
from lightbase.core.transfer import freeze_parameters


class Normed(nn.Module):
    """With BatchNorm and Dropout, whose behaviour depends on the mode."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)
        )
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.head = nn.Sequential(
            nn.Dropout(0.1), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).mean((2, 3)))


class WatchesModes(Classifier):
    """Fails where a step finds a frozen part in training mode, or another one in eval
    mode; calls train() itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not any(module.training for module in self.net.stem.modules())
        assert all(module.training for module in self.net.head.modules())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        self.train()


NET = (
    "--model=test_frozen.WatchesModes",
    "--model.net=test_frozen.Normed",
    "--model.freeze=stem",
)
AVERAGING = "lightning.pytorch.callbacks.EMAWeightAveraging"
DECAY = ("--model.optimizer", "AdamW", "--model.optimizer_args.weight_decay", 0.5)


def built() -> dict[str, Tensor]:
    torch.manual_seed(42)
    return Normed().state_dict()


@pytest.mark.parametrize(
    "flags",
    [
        DECAY,
        (f"--trainer.callbacks={AVERAGING}", "--trainer.val_check_interval=0.5"),
    ],
    ids=["decay", "averaging"],
)
def test_the_frozen_part_stays_bit_for_bit(train, tmp_path, flags, capsys):
    train(*NET, *flags)
    assert capsys.readouterr().out.count("Frozen: 120 of 196 parameters\n") == 1
    for name, value in built().items():
        saved = weights(tmp_path / "tiny" / "version_0")[f"net.{name}"]
        # torch's average of two equal numbers is one up to rounding
        tolerance = 1e-6 if AVERAGING in str(flags) else 0
        is_same = torch.allclose(saved, value, rtol=tolerance, atol=tolerance)
        assert is_same == name.startswith("stem.")


def test_a_resumed_run_ends_with_the_same_weights(train, tmp_path, monkeypatch):
    train(*NET, *DECAY, "--name", "whole")
    monkeypatch.setattr(Terminate, "at_batch", 11)
    with pytest.raises(SystemExit):
        train(*NET, *DECAY, "--trainer.callbacks", "stops.Terminate")
    train("--ckpt_path", "last", "--trainer.max_epochs", 2)
    assert equal(
        *(weights(tmp_path / name / "version_0") for name in ("tiny", "whole"))
    )


@pytest.mark.parametrize(
    ("names", "frozen", "in_eval"),
    [
        (["stem.1"], {"stem.1.weight", "stem.1.bias"}, {"stem.1"}),
        (["stem.?.bias"], {"stem.0.bias", "stem.1.bias"}, set()),
        (["head.[13].*"],
         {"head.1.weight", "head.1.bias", "head.3.weight", "head.3.bias"},
         {"head", *(f"head.{i}" for i in range(4))}),
        (["norms_and_biases", "stem.0"],
         {"stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias", "head.1.bias",
          "head.3.bias"},
         {"stem", *(f"stem.{i}" for i in range(4))}),
    ],
)  # fmt: skip
def test_names_are_beginnings_or_patterns(names, frozen, in_eval):
    model = Classifier(Normed(), num_classes=4)
    freeze_parameters(model, names)
    parameters, modules = model.net.named_parameters(), model.net.named_modules()
    assert {name for name, value in parameters if not value.requires_grad} == frozen
    assert {name for name, module in modules if not module.training} == in_eval


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stme", "did you mean stem?"),
        ("net.stem", "did you mean"),
        ("*", "nothing would train"),
        ("net", "some names"),
        ("norm", "no parameter of the network"),
    ],
)
def test_a_mistake_names_the_way_out(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        freeze_parameters(Classifier(Normed(), num_classes=4), [name])
    assert message in str(caught.value)
    assert caught.value.status == 2
