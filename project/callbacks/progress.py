"""How a training gets on: a progress bar in a terminal, a line an epoch elsewhere, and early stopping."""

import math
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf

from project.base.datamodule import TensorDataModule

REFRESH_S = 0.2


class Pace:
    """Images a second (samples, for other data) on all devices, without validations; and the time left, with them."""

    paused = 0.0  # the sanity check comes before the beginning

    def begin(self, trainer: Trainer) -> None:
        self.start, self.first_step = time.monotonic(), trainer.global_step
        self.num_steps: float = trainer.estimated_stepping_batches
        self.paused = 0.0

    def pause(self) -> None:
        self.pause_start = time.monotonic()

    def go_on(self) -> None:
        self.paused += time.monotonic() - self.pause_start

    def words(self, trainer: Trainer) -> list[str]:
        """No speed for data that is no TensorDataModule, no time left of a training without an end, or at it."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        seconds, done = time.monotonic() - self.start, trainer.global_step - self.first_step
        found = []
        if done and isinstance(data, TensorDataModule):
            num = done * data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
            what = "images" if data.image_shape else "samples"
            found.append(f"{num / max(seconds - self.paused, 1e-9):,.0f} {what}/s")
        left = self.num_steps - trainer.global_step
        if done and 0 < left < math.inf:
            found.append(f"{clock(seconds * left / done)} left")
        return found


class TrainingProgressBar(TQDMProgressBar):
    """Lightning's bar, redrawn five times a second rather than after so many batches: with steps of a millisecond a
    redraw costs as much as a step. It shows loss and accuracy, images a second and the time left of the training."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=50)  # of validation and test
        self.pace = Pace()
        self.redrawn = 0.0
        self.shown: list[str] = []
        self.shown_step = -1

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
        return bar

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        super().on_train_start(trainer, pl_module)
        self.pace.begin(trainer)
        self._describe_epoch(trainer)  # in the middle of one the other hook is not called

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self._describe_epoch(trainer)

    def _describe_epoch(self, trainer: Trainer) -> None:
        self.train_progress_bar.total = convert_inf(self.total_train_batches)
        of = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        self.train_progress_bar.set_description_str(f"Epoch {trainer.current_epoch + 1}{of}", refresh=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_disabled:
            return
        now = time.monotonic()
        if now - self.redrawn >= REFRESH_S or trainer.is_last_batch:
            self.redrawn = now
            self.train_progress_bar.n = trainer.fit_loop.batch_idx + 1  # one call may train several batches
            self._redraw(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_disabled:
            self._redraw(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self.pace.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pace.go_on()
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        self.shown_step = -1  # there are new metrics

    def _redraw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # reading a metric waits for the GPU: only those of a new log step, which has just waited
        if self.shown_step < 0 or trainer.global_step - self.shown_step >= every:
            self.shown_step = trainer.global_step - trainer.global_step % max(1, every)
            metrics = self.get_metrics(trainer, pl_module)
            self.shown = [f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float)]
        parts = [*self.pace.words(trainer), *self.shown]
        self.train_progress_bar.set_postfix_str(", ".join(parts), refresh=False)
        self.train_progress_bar.refresh()


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    return Tqdm.format_interval(round(seconds)).lstrip("0").rjust(4, "0")


class EpochLines(Callback):
    """Prints each epoch's metrics: for output that is no terminal, in place of a progress bar."""

    def __init__(self) -> None:
        self.pace = Pace()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pace.begin(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pace.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pace.go_on()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        parts = [f"{name} {value:.4f}" for name, value in values.items() if name != "lr"] or ["nothing logged"]
        parts += self.pace.words(trainer)
        of = f" of {trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        print(f"Epoch {trainer.current_epoch + 1}{of}: {', '.join(parts)}", flush=True)


class Patience(EarlyStopping):
    """Early stopping that a resumed run keeps to: one that had stopped does not start again, unless the patience has
    been raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience
