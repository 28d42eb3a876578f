"""Nothing waits for the GPU but log steps and the ends of epochs: torch tells what
waits."""

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import Callback
from torch import Tensor

from lightbase import crop_and_flip
from lightbase.commands import train

pytestmark = pytest.mark.gpu
FLAGS = "--trainer.accelerator gpu --trainer.log_every_n_steps 7 "
FLAGS += "--trainer.limit_test_batches 0"
RESIDENT = "--data.resident true"
# In 16-mixed GradScaler reads one number a step if gradients are clipped or the
# optimizer is not fused.
EXPECTED = "self.scaler.step("

# between a line that waits and its note
BETWEEN = (str(Path(torch.__file__).parent), str(warnings.__file__))
NOTES = ("tell", "show")


class Watch(Callback):
    """Counts the waits that `tell` hears of: `found` in training steps that are no log
    steps and in the batches of a validation, `allowed` in log steps; those at the ends
    of epochs do not count. By stage, reason and line."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.allowed: Counter[str] = Counter()
        # since the last training step ended
        self.newest: Counter[str] = Counter()
        self.stage: str | None = None

    def tell(self, reason: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            if frame.name not in NOTES and not frame.filename.startswith(BETWEEN):
                break
        if self.stage:
            where = f"{frame.filename}:{frame.lineno}, {frame.line}"
            self.newest[f"{self.stage}: {reason} in {where}"] += 1

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.stage, self.step = "training", trainer.global_step
        self.was_log_step = True  # with the loader's start

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        every = trainer.log_every_n_steps
        is_log_step = trainer.global_step // every > self.step // every
        # after this hook Lightning writes the curves
        counts = self.allowed if is_log_step or self.was_log_step else self.found
        counts += self.newest
        self.newest.clear()
        self.step, self.was_log_step = trainer.global_step, is_log_step
        if trainer.is_last_batch:
            self.stage = None

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.stage = None if trainer.sanity_checking else "validation"

    def on_validation_batch_end(
        self, trainer: Any, _: Any, __: Any, ___: Any, batch_idx: int, *____: Any
    ) -> None:
        if self.stage and batch_idx + 1 == trainer.num_val_batches[0]:
            self.found += self.newest
            self.newest.clear()
            self.stage = None

    def unexpected(self) -> list[str]:
        return [line for line in self.found if EXPECTED not in line]


@contextlib.contextmanager
def real_gpu(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell of what waits for the GPU."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            tell("waits")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Tells(Classifier):
    """Has a curve of a number."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = self.criterion(logits, batch[1])
        self.track("train", loss, logits, batch[1], half=0.5, batch=batch_idx)
        return loss


class Cropped(SyntheticImages):
    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, 1, flip=True)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    make = train.make_callbacks
    monkeypatch.setattr(train, "make_callbacks", lambda *args: [*make(*args), watch])

    with real_gpu(watch.tell):
        yield watch


@pytest.mark.parametrize(
    "flags",
    [
        f"{RESIDENT} --trainer.enable_progress_bar true",
        f"{RESIDENT} --model test_waits.Tells",
        "--data test_waits.Cropped --data.pin_memory true --figures_every_n_epochs 1",
        f"{RESIDENT} --trainer.precision 16-mixed",
    ],
)
def test_only_log_steps_wait_for_the_gpu(train, watch, flags):
    train(FLAGS, flags)
    assert not watch.unexpected()
    assert watch.allowed
