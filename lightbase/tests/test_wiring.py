"""What does not come with other people's modules and data is said, and what does come
with them works."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ACCELERATOR, Train
from plain import PlainModule
from written import equal, weights


class Scheduled(PlainModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=10
            ),
        }


@pytest.fixture
def plain(tmp_path: Path, train: Train) -> Train:
    config = tmp_path / "plain.yaml"
    config.write_text(
        "model: test_wiring.Scheduled\ndata: plain.PlainData\n"
        f"trainer: {{accelerator: {ACCELERATOR}}}"
    )
    quiet = (
        "--step_timer",
        "false",
        "--device_monitor",
        "false",
        "--trainer.log_every_n_steps",
        5,
    )
    return lambda *args: train(
        "--monitor", "val_loss", *quiet, *args, config=str(config)
    )


def test_what_does_not_work_is_said(plain, train, capsys):
    plain("--trainer.max_epochs", 1)
    shown = capsys.readouterr().out
    assert (
        "PlainData has its own DataLoaders: a resume may end with other weights; "
        in shown
    )
    train("--trainer.max_epochs", 1)
    assert "its own" not in capsys.readouterr().out


def test_from_the_end_of_an_epoch_a_stock_loader_goes_on_in_the_order_of_an_uninterrupted_run(
    plain, tmp_path
):
    plain("--name", "whole", "--trainer.max_epochs", 3)
    plain("--name", "cut", "--trainer.max_epochs", 1)
    plain("--name", "cut", "--trainer.max_epochs", 3, "--ckpt_path", "last")
    assert equal(
        weights(tmp_path / "whole" / "version_0"),
        weights(tmp_path / "cut" / "version_0"),
    )
