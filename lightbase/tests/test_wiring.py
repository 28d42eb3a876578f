"""Other people's modules and data resume, too."""

import torch
from paths import ACCELERATOR
from plain import PlainModule
from written import equal, weights


class Scheduled(PlainModule):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=10
            ),
        }


def test_from_the_end_of_an_epoch_a_stock_loader_goes_on_in_the_order_of_an_uninterrupted_run(
    train, tmp_path, capsys
):
    config = tmp_path / "plain.yaml"
    config.write_text(
        "model: test_wiring.Scheduled\ndata: plain.PlainData\nmonitor: val_loss\n"
        f"trainer: {{accelerator: {ACCELERATOR}, log_every_n_steps: 5}}\n"
        "step_timer: false\ndevice_monitor: false"
    )
    train("--name whole --trainer.max_epochs 3", config=str(config))
    said = "PlainData has its own DataLoaders: a resume may end with other weights; "
    assert said in capsys.readouterr().out
    train("--name cut --trainer.max_epochs 1", config=str(config))
    resume = "--name cut --trainer.max_epochs 3 --ckpt_path last"
    train(resume, config=str(config))
    whole, cut = (weights(tmp_path / name / "version_0") for name in ("whole", "cut"))
    assert equal(whole, cut)
