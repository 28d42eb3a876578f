"""Nothing waits for the GPU but log steps and the ends of epochs: shown on a GPU, or on a device
that stands in for one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from paths import argv
from torch import Tensor
from waits import Watch, real_gpu, stand_in

from lightbase.data.transforms import crop_and_flip
from lightbase.run import train as run

Train = Callable[..., dict[str, Any]]
HAS_GPU = torch.cuda.is_available()
FLAGS = argv(
    f"--trainer.accelerator {'gpu' if HAS_GPU else 'stand_in'}",
    "--trainer.log_every_n_steps 7 --trainer.limit_test_batches 0",
)
# Metrics follow the first outputs to their device. In 16-mixed GradScaler reads one number a step
# if gradients are clipped or the optimizer is not fused.
EXPECTED = ("metrics.to(", "self.scaler.step(")
RESIDENT = ("--data.resident", "true")
SLOW = pytest.mark.slow
ONE = ("--trainer.strategy", "auto" if HAS_GPU else "stand_in")
SEVERAL = ("--steps_per_execution", 3)
CROPS = ("--data", "test_waits.Cropped", "--data.pin_memory", "true")


class Tells(Classifier):
    """Has a curve of a number."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = self.criterion(logits, y)
        self.track("train", loss, logits, y, half=0.5, batch=batch_idx)
        return loss


class Cropped(SyntheticImages):
    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, 1, flip=True)


class Waits(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss.item() > 0
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = super().validation_step(batch, batch_idx)
        assert len(logits[batch[1] == 0]) <= len(logits)
        return logits


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    make = run.make_callbacks
    monkeypatch.setattr(run, "make_callbacks", lambda *args: [*make(*args), watch])

    with (real_gpu if HAS_GPU else stand_in)(watch.tell):
        yield watch


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            (*ONE, *RESIDENT, "--trainer.enable_progress_bar", "true"),
            id="one step a call",
            marks=SLOW,
        ),
        pytest.param(
            (*SEVERAL, *RESIDENT, "--model", "test_waits.Tells"), id="several steps a call"
        ),
        pytest.param((*ONE, *CROPS, "--figures_every_n_epochs", 1), id="pinned", marks=SLOW),
        pytest.param(
            (*ONE, *RESIDENT, "--trainer.precision", "16-mixed"),
            id="16-mixed",
            marks=pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla"),
        ),
    ],
)
def test_only_log_steps_wait_for_the_gpu(train, watch, flags):
    train(*FLAGS, *flags)
    others, log_steps = (
        [line for line in counts if not any(text in line for text in EXPECTED)]
        for counts in (watch.found, watch.allowed)
    )
    assert not others
    assert HAS_GPU or len(log_steps) == 2  # the point, and whether a loss is NaN
    assert HAS_GPU or ("16-mixed" in flags) == any(
        "self.scaler.step(" in line for line in watch.found
    )


@pytest.mark.slow
def test_a_line_that_waits_is_found(train: Train, watch: Watch) -> None:
    train(*FLAGS, *SEVERAL, *RESIDENT, "--model", "test_waits.Waits")
    assert {line.partition(":")[0] for line in watch.found} == {"training", "validation"}
    assert all("test_waits.py" in line for line in watch.found)
