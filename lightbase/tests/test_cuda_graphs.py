"""Recorded steps give the run of ordinary steps: the same weights, state and curves. A
step that cannot be recorded ends the run before the first step, in two lines.

A CPU emulates the recording: the step runs once, what it has computed is taken back, and
a replay runs it again. So all is tried here but the capture itself, see the tests at the
end of the file.
"""

import os
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example.classifier import Classifier
from lightning import Callback
from paths import fails
from small import Augmented
from torch import Tensor, nn
from written import checkpoint, curves

from lightbase.data.tensors import tensors_in
from lightbase.watch import cuda_graphs
from lightbase.watch.cuda_graphs import CudaGraphs

HERE = "test_cuda_graphs"
ORDINARY = "--cuda_graphs false"
ON = "--cuda_graphs true"


class Noisy(nn.Module):
    """With dropout, batch norm, and a convolution."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers, nn.Linear(4 * 36, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


NOISY = f"--model.net {HERE}.Noisy --data small.Augmented --model.per_class true"


class Emulated:
    """Stands for a CUDA graph."""

    graphs: CudaGraphs
    num_recorded = num_replayed = 0

    def __init__(self, function: Any) -> None:
        graphs = function.__self__
        before = graphs.state()
        self.drawn = random.getstate()
        try:
            function()
        finally:
            graphs.restore(before)
        self.function, self.graphs = function, graphs
        Emulated.num_recorded += 1

    def replay(self) -> None:
        """Run the step, and write its results to where the recording has them. Python
        draws the numbers of the recording again; torch's are those of the GPU."""
        drawn = random.getstate()
        random.setstate(self.drawn)
        graphs, recorded, output = self.graphs, self.graphs.recorded, self.graphs.output
        calls, graphs.calls = graphs.calls, []
        self.function()
        random.setstate(drawn)
        for row, value in zip(
            tensors_in((recorded, output)),
            tensors_in((graphs.calls, graphs.output)),
            strict=True,
        ):
            row.copy_(value)
        graphs.calls, graphs.output = calls, output
        Emulated.num_replayed += 1


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU record steps and replay them."""
    against = cuda_graphs.obstacles
    here = lambda trainer: (x for x in against(trainer) if "GPU" not in x)  # noqa: E731
    monkeypatch.setattr(cuda_graphs, "obstacles", here)
    monkeypatch.setattr(CudaGraphs, "make_graph", Emulated)
    monkeypatch.setattr(Emulated, "num_recorded", 0)
    monkeypatch.setattr(Emulated, "num_replayed", 0)


def of_training(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds of a training, as plain values by their places."""
    found = {}

    def visit(place: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                visit(f"{place}/{key}", part)
        elif isinstance(value, list | tuple):
            for i, part in enumerate(value):
                visit(f"{place}/{i}", part)
        else:
            found[place] = value.tolist() if isinstance(value, Tensor) else value

    visit("", checkpoint(folder))
    # current_score: a resume on a GPU has another one, with ordinary steps, too
    other = re.compile(
        r"/config/(name|cuda_graphs)$|train_seconds|current_score|/checkpoints/|dirpath|_path"
    )
    return {place: found[place] for place in found if not other.search(place)}


def assert_same(folder: Path, other: Path) -> None:
    found, expected = of_training(folder), of_training(other)
    assert len(expected) > 100
    wrong = [x for x in expected.keys() | found if found.get(x) != expected.get(x)]
    assert not wrong
    points, other_points = curves(folder), curves(other)
    names = [
        x for x in points.keys() | other_points if not x.startswith("watch/device")
    ]
    assert names
    assert [points.get(x) for x in names] == [other_points.get(x) for x in names]


# flags, and the least number of replays in 38 steps
LENGTHS = [
    ("--trainer.log_every_n_steps 7", 25),
    ("--trainer.max_steps 33", 20),
    ("--trainer.val_check_interval 8", 25),
    ("--trainer.val_check_interval 30 --trainer.check_val_every_n_epoch null", 25),
    ("--trainer.limit_train_batches 13 --data.drop_last false", 15),
    ("--data.drop_last false --trainer.log_every_n_steps 1000", 25),
    (
        "--model.scheduler OneCycleLR --model.scheduler_args.cycle_momentum false",
        0,  # the rate changes in each step
    ),
    (
        "--model.scheduler StepLR --model.scheduler_args.step_size 8 --model.scheduler_interval step",
        12,
    ),
    (
        "--trainer.gradient_clip_val 0.1 --model.optimizer SGD --model.optimizer_args.momentum 0.9",
        25,
    ),
    (
        '--model.parameter_groups {"norms_and_biases":{"lr":0.001}} --trainer.reload_dataloaders_every_n_epochs 1',
        25,
    ),
    (f"--trainer.callbacks {HERE}.Pulls --trainer.callbacks+ {HERE}.Drops", 25),
    (f"--trainer.callbacks {HERE}.Freezes", 20),
    (f"--trainer.callbacks {HERE}.ChangesFactor --model {HERE}.Step", 15),
    (f"--data {HERE}.CountingImages", 25),
    ("--trainer.accelerator cpu --model.net.num_classes 4", 25),
]
QUICK = (0, 7, 10, 12)


def replays_are_equal(train: Any, folder: Path, flags: str, num_replays: int) -> None:
    flags = f"{NOISY} {flags} --trainer.deterministic true"
    train(flags, ORDINARY, "--name ordinary")
    train(flags, ON)
    assert Emulated.num_replayed >= num_replays + 2  # with those of the trial
    assert_same(folder / "tiny/version_0", folder / "ordinary/version_0")


@pytest.mark.parametrize(("flags", "num_replays"), [LENGTHS[i] for i in QUICK])
def test_replays_train_as_lightnings_steps(
    train, tmp_path, emulated, flags, num_replays
):
    replays_are_equal(train, tmp_path, flags, num_replays)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "num_replays"), [x for i, x in enumerate(LENGTHS) if i not in QUICK]
)
def test_replays_train_as_lightnings_steps_with_other_flags(
    train, tmp_path, emulated, flags, num_replays
):
    replays_are_equal(train, tmp_path, flags, num_replays)


def test_a_resume_within_an_epoch_ends_as_an_uninterrupted_run(
    train, tmp_path, emulated, monkeypatch
):
    flags = f"{NOISY} --trainer.log_every_n_steps 7".replace(
        "small.Augmented", f"{HERE}.Stops"
    )
    train(flags, ORDINARY, "--name ordinary")
    monkeypatch.setattr(Stops, "at_step", 25)
    with pytest.raises(SystemExit):
        train(flags, ON)
    steps = checkpoint(tmp_path / "tiny/version_0")["global_step"]
    assert 19 < steps < 38
    monkeypatch.setattr(Stops, "at_step", -1)
    train(flags, "--ckpt_path last")
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


class Stops(Augmented):
    """Gets SIGTERM when it transforms a batch."""

    at_step = -1

    def augment(self, inputs: Tensor) -> Tensor:
        if self.trainer.global_step == self.at_step:
            signal.raise_signal(signal.SIGTERM)
        return super().augment(inputs)


class Pulls(Callback):
    """Pulls the weights to their average after each fifth step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.averages = [x.detach().clone() for x in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % 5:
            return
        for weight, average in zip(pl_module.parameters(), self.averages, strict=True):
            average.lerp_(weight.detach(), 0.3)
            weight.detach().copy_(average)


class Drops(Callback):
    """Drops the gradient of a bias after the first epoch."""

    is_recordable = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, _: Any) -> None:
        if trainer.current_epoch:
            pl_module.net.layers[0].bias.grad = None


class DropsUndeclared(Drops):
    is_recordable = False


class Freezes(Callback):
    """Freezes a bias within an epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            pl_module.net.layers[0].bias.requires_grad_(False)


class ChangesFactor(Callback):
    """Changes a number that the step reads, now and then."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % 9 == 0:
            pl_module.factor = 1 / trainer.global_step


class Step(Classifier):
    """One of the user's steps."""

    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor


class Indexed(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + batch_idx % 3)


class First(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 7:
            return None
        return super().training_step(batch, batch_idx)


class Global(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / (1 + self.trainer.global_step)


class Counts(Step):
    num = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num += 1
        factor = 0.0 if self.num == 30 else 1.0
        return super().training_step(batch, batch_idx) * factor


class CountsInList(Step):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.nums: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.nums.append(1)
        return super().training_step(batch, batch_idx) / len(self.nums)


class CountsElsewhere(Step):
    """Counts in an object that is no module."""

    counter = SimpleNamespace(num=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counter.num += 1
        return super().training_step(batch, batch_idx) / self.counter.num


class Averages(Step):
    """Keeps a tensor that is no buffer."""

    mean: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        last = loss if self.mean is None else self.mean
        self.mean = 0.9 * last.detach() + 0.1 * loss.detach()
        return loss + self.mean * 0.01 * self.net.layers[1].bias.sum()


class Heads(nn.Module):
    """One of its heads at random is trained."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(192, num_classes) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[random.randrange(12)](x.flatten(1))


class Draws(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * random.random()


class Logs(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/twice", 2 * loss, on_step=True, on_epoch=True)
        return loss


class Hook(Step):
    num = 0

    def on_before_zero_grad(self, *_: Any) -> None:
        self.num += 1
        self.factor = 1 / self.num


class Manual(Step):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class CountingImages(Augmented):
    """Counts in the data module, whose transforms are no part of a recording."""

    num = 0

    def augment(self, inputs: Tensor) -> Tensor:
        self.num += bool(self.trainer.global_step)
        return inputs // (1 + self.num // 30)


STEPS = [
    ("--model {0}.Indexed", "'BatchIndex'"),
    ("--model {0}.Counts", "the step changes the attribute .num"),
    ("--model {0}.CountsElsewhere", "a replay gives other values"),
    ("--model.net {0}.Heads", "--cuda_graphs true: "),
    ("--model {0}.Logs", "the step calls self.log"),
    ("--model {0}.Hook", "a replay would not call on_before_zero_grad of Hook"),
    ("--model {0}.Manual", "the model has manual optimization"),
    ("--model.optimizer LBFGS", "the optimizer is not fused"),
    ("--trainer.accumulate_grad_batches 2", "trainer.accumulate_grad_batches"),
    ("--model.optimizer_args.fused false", "the optimizer is not fused"),
    ("--model.compile_net aot_eager", "model.compile_net"),
    ("--trainer.callbacks {0}.DropsUndeclared", "on_before_optimizer_step of Drops"),
]

MORE_STEPS = [
    ("--model {0}.First", "'NoneType' object is not callable"),
    ("--model {0}.Global", "the step looks at global_step"),
    ("--model {0}.CountsInList", "the step changes the attribute .nums"),
    ("--model {0}.Averages", "the step changes the attribute .mean"),
    ("--model {0}.Draws", "a replay gives other values"),
]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [*STEPS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_STEPS)],
)
def test_a_step_that_cannot_be_recorded_ends_the_run_before_the_first_step(
    train, tmp_path, capsys, emulated, flags, reason
):
    error = fails(capsys, 2, lambda: train(NOISY, flags.format(HERE), ON))
    assert error.startswith("error: --cuda_graphs true: ")
    assert reason in error
    assert len(error.splitlines()) == 2
    assert not [*tmp_path.rglob("version_*")]


def test_there_is_no_recording_without_a_gpu(train, capsys):
    error = fails(capsys, 2, lambda: train(ON, "--trainer.accelerator cpu"))
    assert "--cuda_graphs true: there is no NVIDIA GPU" in error


class Waits(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (2.0 if loss.item() > 1 else 1.0)


ON_GPU = "--trainer.accelerator gpu --trainer.deterministic true"
REAL_GPU = pytest.mark.skipif(
    "SIMGPU_FOLDER" in os.environ, reason="a simulated GPU records nothing"
)


@pytest.mark.gpu
@REAL_GPU
@pytest.mark.parametrize(("flags", "_"), LENGTHS[:-1])
def test_on_a_gpu_replays_train_as_ordinary_steps_do(train, tmp_path, flags, _):
    train(NOISY, flags, ON_GPU, ORDINARY, "--name ordinary")
    train(NOISY, flags, ON_GPU, ON)
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


@pytest.mark.gpu
@REAL_GPU
def test_on_a_gpu_a_resume_within_an_epoch_goes_on(train, tmp_path):
    flags = f"{NOISY} {ON_GPU} --trainer.max_epochs 3 --model.scheduler StepLR"
    flags += " --model.scheduler_args.step_size 5 --model.scheduler_interval step"
    train(flags, ORDINARY, "--name ordinary")
    train(flags, ON, "--trainer.max_steps 26")
    train(flags, ON, "--trainer.max_steps -1 --ckpt_path last")
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


@pytest.mark.gpu
@REAL_GPU
@pytest.mark.parametrize(
    ("flags", "reason"), [*STEPS, ("--model {0}.Waits", "loss.item() > 1")]
)
def test_on_a_gpu_a_step_that_cannot_be_recorded_is_told(train, capsys, flags, reason):
    error = fails(capsys, 2, lambda: train(NOISY, flags.format(HERE), ON_GPU, ON))
    assert reason in error
