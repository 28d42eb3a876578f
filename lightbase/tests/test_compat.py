"""Each private attribute that compat.py reads or sets still does what the library
relies on.

A test that fails after an upgrade names the function of compat.py to look at. Some also
show that
the package still needs it: where such a line fails, the function may go.
"""

from typing import Any

import pytest
from lightning import Callback, Trainer
from plain import PlainData, PlainModule

from lightbase import compat


class Counts(Callback):
    """Notes the counters in the middle of the second epoch."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if compat.batch_index(trainer) == 8 and trainer.current_epoch == 1:
            self.counts = [
                compat.num_batches(trainer),
                compat.epochs_done(trainer),
                compat.logged_step(trainer),
            ]
            self.state = {"loops": {"fit_loop": trainer.fit_loop.state_dict()}}


@pytest.mark.filterwarnings("ignore::Warning")  # of Lightning, about loaders and logs
def test_the_counters_of_the_loop_and_of_its_state() -> None:
    counts = Counts()
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[counts],
    )
    trainer.fit(PlainModule(), PlainData())  # 19 batches, 10 steps an epoch
    assert counts.counts == [19 + 9, 1, 10 + 4]
    saved = counts.state
    epochs = compat.saved_epochs(saved)["current"]
    assert (epochs["ready"], epochs["processed"]) == (2, 1)
    assert compat.saved_logged_step(saved) == 10 + 4
    assert compat.epochs_done(trainer) == 2


def test_skip_ended_epoch_is_needed() -> None:
    trainer: Any = Trainer(accelerator="cpu", logger=False, max_epochs=-1, max_steps=2)
    loop = trainer.fit_loop
    loop.restarting = False
    assert loop.restarting  # as long as Lightning's issue 19617 is open
