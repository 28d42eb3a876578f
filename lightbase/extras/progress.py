"""Progress: a line for each epoch and, in a terminal, a bar below; early stopping."""

import contextlib
import math
import sys
import time
from typing import Any

from lightning import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, Timer, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf

from lightbase.core.curves import MayMissSteps, is_of_class
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import say
from lightbase.core.module import BaseModule

REFRESH_S = 0.2  # a redraw takes 0.1 ms
LINE_S = 60
LEAST = 30  # columns for the epoch and the bar itself


class Pace:
    """Speed of a training on all devices and the time left, both with validations."""

    def __init__(self, trainer: Any) -> None:
        self.start, self.first_step = time.monotonic(), trainer.global_step
        # batches, not steps: each of several optimizers counts its steps, and a
        # GradientAccumulationScheduler changes how many batches a step takes
        self.first_batch = trainer.fit_loop.total_batch_idx

    def texts(self, trainer: Any) -> list[str]:
        """Images a second, for a BaseDataModule; time left, unless the training has no
        end."""
        seconds, data, texts = time.monotonic() - self.start, trainer.datamodule, []
        num_batches = trainer.fit_loop.total_batch_idx - self.first_batch
        if not num_batches:
            return []
        if isinstance(data, BaseDataModule):
            speed = (
                num_batches * data.batch_size * trainer.world_size / max(seconds, 1e-9)
            )
            texts.append(
                f"{speed:,.0f} {'images' if data.image_shape else 'samples'}/s"
            )
        limits = [
            cb.time_remaining() for cb in trainer.callbacks if isinstance(cb, Timer)
        ]
        if (trainer.max_epochs or -1) > 0:
            num_left = trainer.max_epochs * trainer.num_training_batches
            num_left -= trainer.fit_loop.total_batch_idx + 1
            limits.append(seconds * num_left / num_batches)
        num_steps = trainer.global_step - self.first_step
        if trainer.max_steps > 0 and num_steps:
            limits.append(
                seconds * (trainer.max_steps - trainer.global_step) / num_steps
            )
        left = min((limit for limit in limits if limit is not None), default=math.inf)
        if 0 < left < math.inf:
            # 1:02:03 or 2:03
            texts.append(
                f"{Tqdm.format_interval(round(left)).lstrip('0').rjust(4, '0')} left"
            )
        return texts


def title(trainer: Any, word: str) -> str:
    """`Epoch 1 of 3` with the word " of "; `Epoch 1` in a training without a number of
    epochs."""
    end = f"{word}{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    return f"Epoch {trainer.current_epoch + 1}{end}"


class EpochLines(MayMissSteps):
    """Prints each epoch's metrics; without a bar also once a minute how far the epoch
    is."""

    validated_epoch = -1
    shown_at = 0.0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.pace, self.shown_at = Pace(trainer), time.monotonic()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, *_: Any
    ) -> None:
        if (
            time.monotonic() - self.shown_at >= LINE_S
            and trainer.progress_bar_callback is None
        ):
            self.shown_at = time.monotonic()
            part = (trainer.fit_loop.batch_idx + 1) / trainer.num_training_batches
            say(
                ", ".join(
                    [f"{title(trainer, ' of ')}: {part:.0%}", *self.pace.texts(trainer)]
                )
            )

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        is_old = (
            self.validated_epoch != trainer.current_epoch
        )  # the values of the validation
        names = [x for x in metrics if not (is_old and x.startswith("val"))]
        names = [name for name in names if name.partition("/")[0] != "lr"]
        if isinstance(pl_module, BaseModule):  # in another module val_x/y is no class
            names = [name for name in names if not is_of_class(name)]
        names.sort(key=lambda name: name.partition("/")[0])  # train/ before val/
        parts = [f"{name} {metrics[name].item():.4f}" for name in names] or [
            "nothing logged"
        ]
        text = ", ".join(parts + self.pace.texts(trainer))
        pl_module.print(f"{title(trainer, ' of ')}: {text}")
        sys.stdout.flush()


class TrainingProgressBar(EpochLines, TQDMProgressBar):
    """Lightning's bar, below the lines of the epochs: speed, time left and values of
    the training, and those of the validation before. Where they do not fit, it has some
    of them."""

    BAR_FORMAT = (
        "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"  # of validation and test
    )

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)  # batches, of validation and test

    def init_validation_tqdm(self) -> Tqdm:
        # only a terminal can draw a second line
        return (
            super().init_validation_tqdm()
            if sys.stdout.isatty()
            else Tqdm(disable=True)
        )

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.train_progress_bar.leave = False  # the lines of the epochs stay
        # Lightning does not call it in the middle of an epoch
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        self.train_progress_bar.set_description_str(title(trainer, "/"), refresh=False)
        self.train_progress_bar.reset(convert_inf(trainer.num_training_batches))
        self._redraw(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, *_: Any
    ) -> None:
        if time.monotonic() - self.shown_at >= REFRESH_S or trainer.is_last_batch:
            self.shown_at = time.monotonic()
            # set, not added to: one call may train several batches
            self.train_progress_bar.n = trainer.fit_loop.batch_idx + 1
            self._redraw(trainer, pl_module)

    def on_exception(self, *_: Any) -> None:
        """Let the next line begin below the bar."""
        for name in ("val_progress_bar", "train_progress_bar", "test_progress_bar"):
            with contextlib.suppress(TypeError):  # there is none yet
                getattr(self, name).close()

    def _redraw(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        # Lightning has read these numbers already: nothing waits for the GPU
        metrics = self.get_metrics(trainer, pl_module).items()
        values = [
            f"{name} {value:.4f}" for name, value in metrics if isinstance(value, float)
        ]
        train = [text for text in values if not text.startswith("val")]
        val = [f"before: {text}" for text in values if text.startswith("val")]
        pace = self.pace.texts(trainer)
        text = ", ".join(pace + train + val)
        if (
            len(text) > (self.train_progress_bar.ncols or 0) - LEAST
        ):  # None if it is no terminal
            text = ", ".join([x for x in pace if "left" in x] + train[:1] + val[:1])
        text = text.replace("{", "{{").replace("}", "}}")
        text = text if self.train_progress_bar.total else "{n_fmt} batches, " + text
        self.train_progress_bar.bar_format = (
            f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {text}"
        )
        self.train_progress_bar.refresh()


class Patience(EarlyStopping):
    """Early stopping that holds in a resumed run: a stopped run does not start again,
    unless the patience has been raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience
