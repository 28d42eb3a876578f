"""How a training gets on: a progress bar in a terminal, a line an epoch elsewhere, and early
stopping."""

import math
import time
from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf

from lightbase.curves import MayMissSteps, is_of_class
from lightbase.data.module import BaseDataModule

REFRESH_S = 0.2


class Pace(Callback):
    """Images a second (samples, for other data) on all devices, without validations; and the time
    left, with them."""

    paused = 0.0  # seconds; the sanity check comes before the start

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.start, self.first_step, self.paused = time.monotonic(), trainer.global_step, 0.0
        self.num_steps: float = trainer.estimated_stepping_batches

    def on_validation_start(self, *_: Any) -> None:
        self.pause_start = time.monotonic()

    def on_validation_end(self, *_: Any) -> None:
        self.paused += time.monotonic() - self.pause_start

    def words(self, trainer: Any) -> list[str]:
        """No speed for data that is no BaseDataModule, no time left of a training without an end,
        or at it."""
        data, found = trainer.datamodule, []
        seconds, done = time.monotonic() - self.start, trainer.global_step - self.first_step
        left = self.num_steps - trainer.global_step
        if done and isinstance(data, BaseDataModule):
            num = done * data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
            what = "images" if data.image_shape else "samples"
            found.append(f"{num / max(seconds - self.paused, 1e-9):,.0f} {what}/s")
        if done and 0 < left < math.inf:
            found.append(f"{clock(seconds * left / done)} left")
        return found


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    return Tqdm.format_interval(round(seconds)).lstrip("0").rjust(4, "0")


class EpochLines(Pace):
    """Prints each epoch's metrics: for output that is no terminal, in place of a progress bar."""

    validated = -1  # the epoch of the newest validation

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        super().on_validation_end()
        self.validated = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = trainer.callback_metrics
        names = sorted(metrics, key=lambda name: name.partition("/")[0])  # train/ before val/
        if self.validated != trainer.current_epoch:
            names = [
                name for name in names if not name.startswith("val")
            ]  # those of an earlier epoch
        names = [name for name in names if name != "lr" and not is_of_class(name)]
        parts = [f"{name} {metrics[name].item():.4f}" for name in names] or ["nothing logged"]
        of = f" of {trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        print(
            f"Epoch {trainer.current_epoch + 1}{of}: {', '.join(parts + self.words(trainer))}",
            flush=True,
        )


class TrainingProgressBar(MayMissSteps, TQDMProgressBar):
    """Lightning's bar, redrawn five times a second rather than after so many batches: with steps of
    a millisecond a redraw costs as much as a step. It shows loss and accuracy, images a second and
    the time left of the training."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=50)  # of validation and test
        self.pace = Pace()
        self.redrawn = 0.0

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
        return bar

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        super().on_train_start(trainer, pl_module)
        self.pace.on_train_start(trainer, pl_module)
        self.on_train_epoch_start(trainer)  # in the middle of an epoch Lightning does not call it

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        of = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        self.train_progress_bar.set_description_str(
            f"Epoch {trainer.current_epoch + 1}{of}", refresh=False
        )
        self.train_progress_bar.reset(convert_inf(self.total_train_batches))

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        now = time.monotonic()
        if now - self.redrawn >= REFRESH_S or trainer.is_last_batch:
            self.redrawn = now
            self.train_progress_bar.n = (
                trainer.fit_loop.batch_idx + 1
            )  # one call may train several batches
            self._redraw(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._redraw(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self.pace.on_validation_start()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.pace.on_validation_end()
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def _redraw(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        metrics = self.get_metrics(
            trainer, pl_module
        ).items()  # numbers already: nothing waits for the GPU
        shown = [f"{name} {value:.4f}" for name, value in metrics if isinstance(value, float)]
        self.train_progress_bar.set_postfix_str(", ".join(self.pace.words(trainer) + shown))


class Patience(EarlyStopping):
    """Early stopping that a resumed run keeps to: one that had stopped does not start again, unless
    the patience has been raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience
