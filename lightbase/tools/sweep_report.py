"""What a trial tells its study while it trains, and when it stops."""

import optuna
from lightning import Callback, LightningModule, Trainer


class Report(Callback):
    """Tells the study each validation, and stops a trial that is below the median of the others."""

    def __init__(self, trial: optuna.Trial, monitor: str | None) -> None:
        self.trial, self.monitor = trial, monitor
        self.told = set(
            trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        )  # before a kill

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # pruned, then killed; where that was before its first checkpoint it starts again
        trainer.should_stop = "pruned" in self.trial.user_attrs and trainer.global_step > 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor or "")
        step = validation_number(trainer)
        if (
            trainer.state.fn != "fit"
            or trainer.sanity_checking
            or value is None
            or not value.isfinite()
        ):
            return
        if step not in self.told:
            self.trial.report(float(value), step)
            self.told.add(step)
        if self.trial.should_prune():
            self.trial.set_user_attr("pruned", step)
            trainer.should_stop = True


def validation_number(trainer: Trainer) -> int:
    """Which validation of the run this is, from 1; the epoch, where each has one."""
    every, num_batches = trainer.val_check_batch, trainer.num_training_batches
    if isinstance(every, int) and isinstance(num_batches, int) and every < num_batches:
        return (
            trainer.current_epoch * (num_batches // every)
            + (trainer.fit_loop.batch_idx + 1) // every
        )
    return trainer.current_epoch + 1
