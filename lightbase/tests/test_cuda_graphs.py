"""Turns of several batches, and recorded steps, give the run of ordinary steps: the same
weights, state and curves.

A CPU emulates the recording: the step runs once, what it has computed is taken back, and
a replay runs it again. So all is tried here but the capture itself, see test_on_gpu.py.
"""

import functools
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from lightning import Callback
from small import Augmented
from torch import Tensor, nn
from written import checkpoint, curves

from lightbase.data.loader import Turn
from lightbase.watch import cuda_graphs
from lightbase.watch.cuda_graphs import CudaGraphs

HERE = "test_cuda_graphs"
LINE = "Ordinary steps, no CUDA graphs: "
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

    def __init__(self, function: Any, device: torch.device) -> None:
        graphs = function.__self__
        # within a recording they would get memory that the step uses, too
        assert graphs.recorder.rows
        values = [x.clone() for x in graphs.tensors()]
        states = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        try:
            function()
        finally:
            for tensor, value in zip(graphs.tensors(), values, strict=True):
                tensor.copy_(value)
            torch.set_rng_state(states[0])
            torch.cuda.set_rng_state_all(states[1])
        self.function = function
        Emulated.num_recorded += 1

    def replay(self) -> None:
        self.function()
        Emulated.num_replayed += 1

    num_recorded = num_replayed = 0


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU record steps and replay them."""
    against = cuda_graphs.against_graphs
    here = lambda trainer: (x for x in against(trainer) if "GPU" not in x)  # noqa: E731
    monkeypatch.setattr(cuda_graphs, "against_graphs", here)
    monkeypatch.setattr(CudaGraphs, "make_graph", Emulated)
    monkeypatch.setattr(CudaGraphs, "rate_type", torch.float64)
    monkeypatch.setattr(Emulated, "num_recorded", 0)
    monkeypatch.setattr(Emulated, "num_replayed", 0)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the turns."""
    lengths: list[int] = []
    run = CudaGraphs.run

    def count(self: CudaGraphs, optimizer: Any, index: int, kwargs: Any) -> Any:
        output = run(self, optimizer, index, kwargs)
        if isinstance(kwargs["batch"], Turn):
            lengths.append(kwargs["batch"].num)
        return output

    monkeypatch.setattr(CudaGraphs, "run", count)
    return lengths


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


LENGTHS = [
    "--trainer.log_every_n_steps 7",
    "--trainer.max_steps 33",
    "--trainer.val_check_interval 8",
    "--trainer.val_check_interval 0.3 --trainer.check_val_every_n_epoch 2",
    "--trainer.val_check_interval 30 --trainer.check_val_every_n_epoch null",
    "--trainer.limit_train_batches 13 --data.drop_last false",
    "--data.drop_last false --trainer.log_every_n_steps 1000",
    "--model.scheduler OneCycleLR --model.scheduler_args.cycle_momentum false --trainer.log_every_n_steps 4",
    "--model.scheduler StepLR --model.scheduler_args.step_size 3 --model.scheduler_interval step",
    "--trainer.gradient_clip_val 0.1 --model.optimizer SGD --model.optimizer_args.momentum 0.9",
    '--model.parameter_groups {"norms_and_biases":{"lr":0.001}} --trainer.reload_dataloaders_every_n_epochs 1',
    "--trainer.overfit_batches 5 --trainer.max_epochs 3",
    f"--trainer.callbacks {HERE}.Pulls --trainer.callbacks+ {HERE}.Drops",
]


@pytest.mark.parametrize("flags", LENGTHS)
def test_turns_train_as_single_batches_do(train, tmp_path, turns, flags):
    train(NOISY, flags, ORDINARY, "--name ordinary")
    assert not turns
    train(NOISY, flags, ON)
    assert max(turns) > 1
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


@pytest.mark.parametrize("flags", LENGTHS)
def test_replays_train_as_single_batches_do(train, tmp_path, turns, emulated, flags):
    flags += " --trainer.deterministic true"
    train(NOISY, flags, ORDINARY, "--name ordinary")
    train(NOISY, flags, "--cuda_graphs true")
    assert Emulated.num_recorded >= 2
    assert Emulated.num_replayed > sum(turns) - 20
    found, expected = tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0"
    assert_same(found, expected)


@pytest.mark.parametrize("way", ["turns", "replays"])
def test_a_resume_within_an_epoch_ends_as_an_uninterrupted_run(
    train, tmp_path, request, monkeypatch, way
):
    flags = (
        f"{NOISY} --model.scheduler CosineAnnealingLR --model.scheduler_interval step"
    )
    flags = f"{flags} --trainer.log_every_n_steps 7"
    flags = flags.replace("small.Augmented", f"{HERE}.Stops")
    train(flags, ORDINARY, "--name ordinary")
    if way == "replays":
        request.getfixturevalue("emulated")
    monkeypatch.setattr(Stops, "batches", [])
    monkeypatch.setattr(Stops, "at", 25)  # in the middle of a turn
    with pytest.raises(SystemExit):
        train(flags, ON)
    steps = checkpoint(tmp_path / "tiny/version_0")["global_step"]
    assert 19 < steps < 38
    monkeypatch.setattr(Stops, "at", -1)
    train(flags, "--ckpt_path last")
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


class Stops(Augmented):
    """Gets SIGTERM when it transforms a batch."""

    at = -1
    batches: list[int] = []  # no attribute that changes, or no step would be replayed

    def augment(self, inputs: Tensor) -> Tensor:
        self.batches.append(len(inputs))
        if len(self.batches) == self.at:
            signal.raise_signal(signal.SIGTERM)
        return super().augment(inputs)


class Sees(Callback):
    """Is called for each batch."""

    batches: list[Any] = []

    def on_train_batch_end(self, _: Any, __: Any, ___: Any, batch: Any, i: int) -> None:
        self.batches.append((i, len(batch[0])))


class SeesStarts(Callback):
    """Its on_train_batch_start is called for each batch, whatever it says."""

    acts_every_n_steps = 5

    def on_train_batch_start(self, _: Any, __: Any, batch: Any, i: int) -> None:
        Sees.batches.append((i, len(batch[0])))


class SeesOften(Sees):
    acts_every_n_steps = 1


@pytest.mark.parametrize(
    ("name", "hook"), [("Sees", "end"), ("SeesOften", "end"), ("SeesStarts", "start")]
)
def test_a_callback_sees_each_batch(train, turns, capsys, monkeypatch, name, hook):
    monkeypatch.setattr(Sees, "batches", [])
    train(f"--trainer.callbacks {HERE}.{name} --cuda_graphs true")
    assert [(i, 16) for _ in range(2) for i in range(19)] == Sees.batches
    assert not turns
    assert f"{LINE}on_train_batch_{hook} of {name}" in capsys.readouterr().out


class Pulls(Callback):
    """Pulls the weights to their average at each fifth step and at the last one."""

    acts_every_n_steps = 5
    calls: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.averages = [x.detach().clone() for x in pl_module.parameters()]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % 5 and step < trainer.estimated_stepping_batches:
            return
        loss = outputs["loss"].item()
        self.calls.append((step, batch_idx, trainer.is_last_batch, loss))
        for weight, average in zip(pl_module.parameters(), self.averages, strict=True):
            average.lerp_(weight.detach(), 0.3)
            weight.detach().copy_(average)


@pytest.mark.parametrize("way", ["turns", "replays"])
@pytest.mark.parametrize(
    "flags",
    [
        "--trainer.log_every_n_steps 1000",
        "--trainer.log_every_n_steps 7 --trainer.max_steps 33",
        "--trainer.val_check_interval 8 --trainer.deterministic true",
    ],
)
def test_a_turn_ends_where_a_callback_acts(
    train, tmp_path, request, monkeypatch, turns, way, flags
):
    flags = f"{NOISY} {flags} --trainer.callbacks {HERE}.Pulls"
    monkeypatch.setattr(Pulls, "calls", [])
    train(flags, ORDINARY, "--name ordinary")
    expected = Pulls.calls
    last = 33 if "max_steps" in flags else 38
    assert [x[0] for x in expected] == [*range(5, last, 5), last]
    if way == "replays":
        request.getfixturevalue("emulated")
    monkeypatch.setattr(Pulls, "calls", [])
    train(flags, ON)
    assert Pulls.calls == expected
    assert max(turns) > 1
    assert (Emulated.num_replayed > 10) == (way == "replays")
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


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

    acts_every_n_steps = 5

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            pl_module.net.layers[0].bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "num_recorded"), [("Drops", 2), ("DropsUndeclared", 0), ("Freezes", 3)]
)
def test_a_recording_has_the_hooks_of_its_epoch(
    train, tmp_path, capsys, emulated, name, num_recorded
):
    flags = f"{NOISY} --trainer.callbacks {HERE}.{name} --trainer.deterministic true"
    train(flags, ORDINARY, "--name ordinary")
    train(flags, "--cuda_graphs true")
    assert Emulated.num_recorded == num_recorded
    line = f"{LINE}on_before_optimizer_step of {name}"
    assert (line in capsys.readouterr().out) == (not num_recorded)
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


class Step(Classifier):
    """One of the user's steps."""

    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor


class Indexed(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + batch_idx % 3)


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


class NewLoaders(Augmented):
    """Has a stock DataLoader in the second epoch."""

    def train_dataloader(self) -> Any:
        if self.trainer.current_epoch == 0:
            return super().train_dataloader()
        samples: Any = self.training_samples
        return torch.utils.data.DataLoader(
            samples, batch_size=16, collate_fn=lambda batch: batch
        )


class Callable(Callback):
    """Has a hook that is no method."""

    def __init__(self) -> None:
        self.on_train_batch_end = functools.partial(lambda *_, **__: None)  # type: ignore[method-assign]


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


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        layers = self.net.layers
        return [torch.optim.SGD(layers[i].parameters(), 0.01) for i in (1, 3)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers = self.optimizers()
        loss = Step.training_step(self, batch, batch_idx)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        optimizers[batch_idx % 2].step()


class Shrinks(Step):
    """Trains on less and less of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        num = 16 - self.trainer.fit_loop.epoch_loop.batch_progress.total.ready % 5
        return super().training_step([x[:num] for x in batch], batch_idx)


class Twice(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


class CountingImages(Augmented):
    """Counts in the data module, and changes batches much later."""

    num = 0

    def augment(self, inputs: Tensor) -> Tensor:
        self.num += 1
        return inputs // (1 + self.num // 30)


STEPS = [
    ("--model {0}.Indexed", "the step looks at batch_idx"),
    ("--model {0}.Global", "the step looks at global_step"),
    ("--model {0}.Counts", "the step changes an attribute, or draws random numbers"),
    ("--model {0}.CountsInList", "the step changes an attribute, or draws random"),
    ("--model {0}.Averages", "the step changes an attribute, or draws random"),
    ("--model.net {0}.Heads", "the optimizer has the state of more weights"),
    ("--data {0}.CountingImages", "the step changes an attribute, or draws random"),
    ("--model {0}.Draws", "the step changes an attribute, or draws random numbers"),
    ("--model {0}.Logs", "the step calls self.log"),
    ("--model {0}.Hook", "on_before_zero_grad of Hook"),
    ("--model {0}.Manual", "Manual has manual optimization"),
    ("--model {0}.TwoOptimizers", "TwoOptimizers has manual optimization"),
    ("--model.optimizer LBFGS", "LBFGS is not fused"),
    ("--model {0}.Shrinks", "equal size"),
    ("--model {0}.Twice", "track"),
    ("--trainer.accumulate_grad_batches 2", "trainer.accumulate_grad_batches"),
    ("--model.optimizer_args.fused false", "Adam is not fused"),
    ("--model.compile_net aot_eager", "model.compile_net"),
    ("--model.scheduler OneCycleLR", "OneCycleLR changes the momentum in each step"),
    ("--data.num_workers 1", "the loader reads single batches"),
    ("--trainer.profiler simple", "trainer.profiler"),
]


@pytest.mark.parametrize(("flags", "reason"), STEPS)
def test_a_step_that_replays_would_freeze_stays_ordinary(
    train, tmp_path, capsys, emulated, flags, reason
):
    flags = flags.format(HERE) + " --trainer.log_every_n_steps 4"
    train(flags, ORDINARY, "--name ordinary")
    assert LINE not in capsys.readouterr().out
    train(flags, "--cuda_graphs true")
    lines = re.findall(f"{LINE}(.*)", capsys.readouterr().out)
    assert len(lines) == 1
    assert reason in lines[0]
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


@pytest.mark.parametrize(
    "name", ["Indexed", "Global", "Draws", "Logs", "Hook", "Twice"]
)
def test_the_steps_of_a_turn_are_lightnings_own(train, tmp_path, turns, name):
    flags = f"--model {HERE}.{name} --trainer.log_every_n_steps 4"
    train(flags, ORDINARY, "--name ordinary")
    train(flags, ON)
    assert sum(turns) > 30
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


@pytest.mark.parametrize(
    "flags",
    [
        "--data {0}.NewLoaders --trainer.reload_dataloaders_every_n_epochs 1",
        "--trainer.callbacks {0}.Callable",
    ],
)
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`", "ignore:.*many workers")
def test_what_can_have_no_turns_trains_as_before(train, tmp_path, flags):
    flags = flags.format(HERE)
    train(flags, ORDINARY, "--name ordinary")
    train(flags, ON)
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


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
@pytest.mark.parametrize("flags", LENGTHS)
def test_on_a_gpu_replays_train_as_ordinary_steps_do(
    train, tmp_path, turns, capsys, flags
):
    train(NOISY, flags, ON_GPU, ORDINARY, "--name ordinary")
    train(NOISY, flags, ON_GPU, "--cuda_graphs true")
    assert LINE not in capsys.readouterr().out
    assert max(turns) > 1
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


@pytest.mark.gpu
@REAL_GPU
def test_on_a_gpu_a_resume_within_an_epoch_goes_on(train, tmp_path, capsys):
    flags = f"{NOISY} {ON_GPU} --trainer.max_epochs 3 --model.scheduler StepLR"
    flags += " --model.scheduler_args.step_size 5 --model.scheduler_interval step"
    train(flags, ORDINARY, "--name ordinary")
    train(flags, "--cuda_graphs true --trainer.max_steps 26")
    train(flags, "--cuda_graphs true --trainer.max_steps -1 --ckpt_path last")
    assert LINE not in capsys.readouterr().out
    assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")


@pytest.mark.gpu
@REAL_GPU
@pytest.mark.parametrize(
    ("flags", "reason"), [*STEPS, ("--model {0}.Waits", "waits for the GPU")]
)
def test_on_a_gpu_a_step_that_replays_would_freeze_stays_ordinary(
    train, tmp_path, capsys, flags, reason
):
    flags = f"{flags.format(HERE)} {ON_GPU} --trainer.log_every_n_steps 4"
    train(flags, ORDINARY, "--name ordinary")
    train(flags, "--cuda_graphs true")
    lines = re.findall(f"{LINE}(.*)", capsys.readouterr().out)
    assert len(lines) == 1
    assert reason in lines[0]
    if "InList" not in flags:
        assert_same(tmp_path / "tiny/version_0", tmp_path / "ordinary/version_0")
