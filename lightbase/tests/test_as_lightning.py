"""What a user changes in a training has the effect that it has in Lightning's bare
Trainer, with the same module and data: the same weights, states of optimizers and
schedules, points of curves, and calls of hooks."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision
from paths import TINY, argv
from small import Augmented
from torch import Tensor, nn
from torch.utils.data import DataLoader
from written import checkpoint

from lightbase.commands.train import parse, train_parsed
from lightbase.compat import quiet_lightning
from lightbase.config.spec import as_list
from lightbase.watch.log import copied_output

HERE = "test_as_lightning"
CALLS: list[Any] = []


class Points(Logger):
    """Keeps the points of all curves."""

    name = version = "points"
    experiment = None

    def __init__(self) -> None:
        super().__init__()
        self.points: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        values = {name: float(metrics[name]) for name in sorted(metrics)}
        self.points.append((step, values))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def result(model: LightningModule) -> dict[str, Any]:
    trainer: Any = model.trainer
    return {
        "weights": {name: x.tolist() for name, x in model.state_dict().items()},
        "optimizers": [as_lists(x.state_dict()) for x in trainer.optimizers],
        "schedules": [
            as_lists(config.scheduler.state_dict())
            for config in trainer.lr_scheduler_configs
        ],
        "steps": (trainer.global_step, trainer.current_epoch),
        "points": points_by_step(trainer.logger.points),
        "calls": [*CALLS],
    }


def as_lists(state: Any) -> str:
    """A text in which all numbers of a state are in full."""
    torch.set_printoptions(profile="full", precision=17)
    try:
        return repr(state)
    finally:
        torch.set_printoptions(profile="default")


def points_by_step(points: list[Any]) -> Any:
    """Merge the points of a step: ours has two callbacks that write at an epoch's
    end."""
    merged: dict[Any, dict[str, float]] = {}
    for step, values in points:
        merged.setdefault(step, {}).update(values)
    return merged


def by_lightning(*flags: str) -> dict[str, Any]:
    quiet_lightning()
    CALLS.clear()
    spec, model, data = parse(argv("--config", TINY, *flags))
    # the callback of the curves comes first, so that the others see what it logs
    callbacks = [model.curves_callback, *as_list(spec.trainer["callbacks"])]
    options = spec.trainer | {"logger": Points(), "callbacks": callbacks}
    options["enable_checkpointing"] = any(isinstance(x, Checkpoint) for x in callbacks)
    options["enable_progress_bar"] = False
    Trainer(**options).fit(model, data)
    return result(model)


def by_train(tmp_path: Path, *flags: str) -> dict[str, Any]:
    CALLS.clear()
    place = ["--trainer.default_root_dir", str(tmp_path), "--test", "false"]
    logger = ["--trainer.logger", f"{HERE}.Points"]
    with copied_output() as log:
        spec, model, data = parse(argv("--config", TINY, *place, *logger, *flags))
        train_parsed(spec, model, data, log)
    return result(model)


class Step(Classifier):
    factor: Any = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor


class Indexed(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + batch_idx % 3)


class Global(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / (1 + self.trainer.global_step)


class Counts(Step):
    """Counts in a buffer and in an attribute."""

    num = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("total", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num += 1
        self.total += len(batch[0])
        return super().training_step(batch, batch_idx) / (self.num + self.total)


class Logs(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/twice", 2 * loss, on_step=True, on_epoch=True)
        self.log("mine", float(batch_idx), on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", float(outputs["loss"]))


class Skips(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 1 else loss


class EverySecond(Step):
    """Accumulates by hand."""

    def optimizer_step(
        self, epoch: Any, index: int, optimizer: Any, closure: Any
    ) -> None:
        CALLS.append((epoch, index))
        if index % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    def optimizer_zero_grad(self, epoch: Any, index: int, optimizer: Any) -> None:
        if index % 2 == 0:
            optimizer.zero_grad()


class Hooks(Step):
    """Has every hook of a step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        CALLS.append(("start", batch_idx, float(batch[0].sum())))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        CALLS.append(("end", batch_idx, float(outputs["loss"]), self.global_step))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        CALLS.append(("zero_grad", self.global_step))

    def on_before_backward(self, loss: Tensor) -> None:
        CALLS.append(("before_backward", loss.item()))

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()

    def on_after_backward(self) -> None:
        CALLS.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5).clamp_(-0.01, 0.01)
        CALLS.append(("step", optimizer.param_groups[0]["lr"]))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        CALLS.append("schedule")
        scheduler.step()


class ByStep(Step):
    """Has a schedule by steps of its own."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        config = {"scheduler": schedule, "interval": "step", "frequency": 3}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Manual(Step):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        weights = [*self.net.parameters()]
        return [torch.optim.SGD(weights[:2], 0.1), torch.optim.Adam(weights[2:], 0.01)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        loss = Step.training_step(self, batch, batch_idx)
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


class ManualLater(Step):
    """Has manual optimization from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.automatic_optimization = self.current_epoch == 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        return optimizer.step()


class Switches(Step):
    """Evaluates within a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.eval()
        with torch.no_grad():
            self.factor = self.net(batch[0]).sigmoid().mean()
        self.net.train()
        return super().training_step(batch, batch_idx)


class ForwardHooks(Step):
    def on_fit_start(self) -> None:
        self.net.register_forward_hook(lambda *args: args[-1] + 0.1 * len(CALLS))
        self.net.register_forward_pre_hook(lambda *_: CALLS.append("forward"))


class Transfers(Step):
    """Has the hooks that transfer a batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        CALLS.append(("before", self.trainer.global_step))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, index: int) -> Any:
        CALLS.append(("transfer", self.trainer.global_step))
        return super().transfer_batch_to_device(batch, device, index)


class Ends(Step):
    """Ends an epoch early, and the training within an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 9 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 15:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Accumulates(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 6:
            self.trainer.accumulate_grad_batches = 3
        return super().training_step(batch, batch_idx)


class Iterates(Step):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        batch = self.trainer.datamodule.transform_batch(batch, True)  # type: ignore[attr-defined]
        return Classifier.training_step(self, batch, batch_idx)


class Backbone(nn.Module):
    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU())
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Noisy(nn.Module):
    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers, nn.Linear(4 * 36, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class OfRate(Augmented):
    """Augments by the learning rate of this moment."""

    def augment(self, inputs: Tensor) -> Tensor:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        CALLS.append(rate)
        return (inputs * min(1.0, 20 * rate)).to(inputs.dtype)


class OfBatch(Augmented):
    """Normalizes by the number of the batch."""

    def normalize(self, inputs: Tensor) -> Tensor:
        number = 0
        if self.trainer:  # not in the dry run
            number = self.trainer.fit_loop.batch_idx
            CALLS.append((number, self.trainer.global_step))
        return super().normalize(inputs) * (1 + number % 3)


class Stock(Augmented):
    """Has a stock DataLoader."""

    def train_dataloader(self) -> Any:
        samples: Any = [self.training_samples[i] for i in range(160)]
        generator = torch.Generator().manual_seed(0)
        return DataLoader(samples, batch_size=16, shuffle=True, generator=generator)


class Sees(Callback):
    """Has the hooks of a batch."""

    def on_train_batch_start(self, trainer: Any, _: Any, batch: Any, i: int) -> None:
        CALLS.append(("start", i, len(batch[0])))

    def on_train_batch_end(
        self, trainer: Any, _: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        CALLS.append(("end", i, trainer.global_step, float(outputs["loss"])))


class SeesSteps(Callback):
    """Has the hooks of a step."""

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        CALLS.append(("zero_grad", trainer.global_step))

    def on_before_backward(self, trainer: Any, _: Any, loss: Tensor) -> None:
        CALLS.append(("before_backward", loss.item()))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        CALLS.append(float(sum(x.grad.sum() for x in module.parameters())))

    def on_before_optimizer_step(self, _: Any, module: Any, optimizer: Any) -> None:
        module.log("norm", nn.utils.get_total_norm(module.parameters()))


class Adds(Callback):
    """Adds a callback when the training starts, one in mid-epoch, and removes it."""

    late: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.callbacks.append(Sees())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 12:
            self.late = SeesSteps()
            trainer.callbacks = [self.late, *trainer.callbacks]
        if trainer.global_step == 25:
            trainer.callbacks = [x for x in trainer.callbacks if x is not self.late]


class Replaces(Callback):
    """Replaces a callback by another one in mid-epoch."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 12:
            (i,) = [i for i, x in enumerate(trainer.callbacks) if type(x) is Quiet]
            trainer.callbacks[i] = Sees()


class Quiet(Callback):
    """Has no hook."""


class GivesHooks(Callback):
    """Gives a callback and the module a hook in mid-epoch, and takes it away."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        (quiet,) = [x for x in trainer.callbacks if type(x) is Quiet]
        if trainer.global_step == 7:
            quiet.on_train_batch_end = lambda *args: CALLS.append(("given", args[-1]))
            module.on_after_backward = lambda: CALLS.append("of the module")
        if trainer.global_step == 30:
            del quiet.on_train_batch_end, module.on_after_backward
        if trainer.global_step == 33:
            Quiet.on_after_backward = lambda *_: CALLS.append("of the class")  # type: ignore[method-assign]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        del Quiet.on_after_backward


class NewOptimizer(Callback):
    """Unfreezes, and sets the optimizers up again."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.net.backbone.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            module.net.backbone.requires_grad_(True)
            trainer.strategy.setup_optimizers(trainer)

    def on_before_optimizer_step(self, trainer: Any, _: Any, optimizer: Any) -> None:
        assert trainer.optimizers[0] is optimizer


class Sets(Callback):
    """Changes what the Trainer looks at, within an epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.log_every_n_steps = 2
            trainer.val_check_batch = 5

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        CALLS.append(trainer.global_step)


class Rates(Callback):
    """Sets the learning rate before a step, and freezes a bias after one."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            [*module.parameters()][1].requires_grad_(False)


class Rounds(Precision):
    """A precision of one's own."""

    def convert_input(self, data: Any) -> Any:
        return [data[0] // 2, data[1]]


LIGHTNINGS = "--trainer.callbacks lightning.pytorch.callbacks."
PLATEAU = "--model.scheduler ReduceLROnPlateau --model.scheduler_args.patience 0"
CHANGES = [
    # those that trained other weights, or ended, with several batches in a turn
    f"--trainer.callbacks {HERE}.NewOptimizer --model.net {HERE}.Backbone",
    f"--data {HERE}.OfRate --model.scheduler OneCycleLR",
    f"--data {HERE}.OfBatch",
    f"--model {HERE}.Accumulates",
    f"--trainer.callbacks {HERE}.Adds",
    f"--trainer.plugins {HERE}.Rounds",
    f"--model {HERE}.ManualLater",
    f"--trainer.callbacks {HERE}.Sets",
    f"--trainer.callbacks {HERE}.GivesHooks --trainer.callbacks+ {HERE}.Quiet",
    f"--trainer.callbacks {HERE}.Quiet --trainer.callbacks+ {HERE}.Replaces",
    f"--model {HERE}.EverySecond --trainer.log_every_n_steps 3",
    f"--model {HERE}.Hooks --model.scheduler WarmupCosineLR",
]
MORE_CHANGES = [
    f"--model {HERE}.Indexed",
    f"--model {HERE}.Global",
    f"--model {HERE}.Counts",
    f"--model {HERE}.Logs --trainer.log_every_n_steps 4",
    f"--model {HERE}.Skips",
    f"--model {HERE}.Skips --trainer.accumulate_grad_batches 3",
    f"--model {HERE}.ByStep --trainer.accumulate_grad_batches 2",
    f"--model {HERE}.Manual",
    f"--model {HERE}.TwoOptimizers",
    f"--model {HERE}.Switches --model.net {HERE}.Noisy",
    f"--model {HERE}.ForwardHooks",
    f"--model {HERE}.Transfers",
    f"--model {HERE}.Ends",
    f"--model {HERE}.Iterates",
    f"--model {HERE}.Hooks --trainer.accumulate_grad_batches 4 --trainer.callbacks {HERE}.SeesSteps",
    f"--trainer.callbacks {HERE}.Sees",
    f"--trainer.callbacks {HERE}.SeesSteps --trainer.log_every_n_steps 2",
    f"--trainer.callbacks {HERE}.Rates",
    f"{LIGHTNINGS}EMAWeightAveraging --trainer.callbacks.decay 0.8 --trainer.callbacks.update_starting_at_step 9",
    f"{LIGHTNINGS}WeightAveraging --trainer.callbacks.use_buffers true",
    f"{LIGHTNINGS}Timer --trainer.callbacks.duration 00:01:00:00",
    f"{LIGHTNINGS}LearningRateMonitor --trainer.callbacks.logging_interval step --model.scheduler OneCycleLR",
    LIGHTNINGS + 'GradientAccumulationScheduler --trainer.callbacks.scheduling {"1":2}',
    f"{LIGHTNINGS}BackboneFinetuning --trainer.callbacks.unfreeze_backbone_at_epoch 1 --model {HERE}.Backboned --model.net {HERE}.Backbone",
    f"{LIGHTNINGS}EarlyStopping --trainer.callbacks.monitor val/loss --trainer.callbacks.stopping_threshold 1.0",
    f"{LIGHTNINGS}LambdaCallback",
    f"{LIGHTNINGS}ModelCheckpoint --trainer.callbacks.every_n_train_steps 7 --trainer.callbacks.save_top_k -1 --trainer.callbacks.dirpath FOLDER",
    f"{LIGHTNINGS}DeviceStatsMonitor --trainer.log_every_n_steps 4",
    f"--data {HERE}.Stock",
    f"{PLATEAU} --trainer.max_epochs 4",
    "--model.scheduler StepLR --model.scheduler_args.step_size 3 --model.scheduler_interval step",
    "--model.optimizer LBFGS --model.lr 0.1",
    "--model.optimizer SGD --model.optimizer_args.momentum 0.9 --trainer.gradient_clip_val 0.1",
    '--model.parameter_groups {"norms_and_biases":{"lr":0.001}}',
    "--trainer.accumulate_grad_batches 3 --trainer.log_every_n_steps 2",
    "--trainer.limit_train_batches 7 --data.drop_last false",
    "--trainer.limit_train_batches 0.5 --trainer.val_check_interval 0.25",
    "--trainer.val_check_interval 6 --trainer.check_val_every_n_epoch null",
    "--trainer.precision bf16-true",
    "--trainer.overfit_batches 3",
    "--trainer.reload_dataloaders_every_n_epochs 1",
    "--trainer.profiler simple",
    "--trainer.detect_anomaly true",
    "--trainer.num_sanity_val_steps 0 --trainer.min_epochs 2",
    f"--model.net {HERE}.Noisy --data small.Augmented --trainer.log_every_n_steps 7",
    "--data.num_workers 1 --data.persistent_workers false",
]


class Backboned(Step):
    """The callback looks for a part of this name."""

    @property
    def backbone(self) -> nn.Module:
        return self.net.backbone  # type: ignore[no-any-return, union-attr]


@pytest.mark.parametrize(
    "flags",
    [
        *CHANGES,
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in MORE_CHANGES),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.*training_step` returned `None",
    "ignore:.*`dataloader_iter`",
    "ignore:.*LearningRateMonitor",
    "ignore:Anomaly Detection",
    "ignore:You have overridden `.*_batch_",
    "ignore:The provided params to be frozen",
)
def test_a_change_has_the_effect_that_it_has_in_lightning(tmp_path, flags):
    expected = by_lightning(flags.replace("FOLDER", str(tmp_path / "lightning")))
    found = by_train(tmp_path / "ours", flags.replace("FOLDER", str(tmp_path / "a")))
    assert found["steps"] == expected["steps"]
    assert found["steps"][0] or "Manual" in flags or "TwoO" in flags
    for part in ("weights", "optimizers", "schedules", "calls"):
        assert found[part] == expected[part], part
    assert found["points"].keys() == expected["points"].keys()
    for step, values in expected["points"].items():
        ours = found["points"][step]
        assert ours.keys() == values.keys()
        same = {x for x in values if not x.startswith("DeviceStatsMonitor")}
        assert {x: ours[x] for x in same} == {x: values[x] for x in same}


class Saves(Callback):
    """Saves a checkpoint within the second epoch, and ends the training there.

    way: The place, or "signal": in a handler of SIGUSR1.
    """

    way: str = ""

    def __init__(self, file: str = "") -> None:
        self.file = file

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer
        signal.signal(signal.SIGUSR1, lambda *_: self.save())

    def save(self) -> None:
        self.trainer.save_checkpoint(self.file)
        self.trainer.should_stop = True

    def save_at(self, way: str) -> None:
        if way == self.way and self.trainer.global_step == 25:
            self.way = ""
            self.save()

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        torch.rand(1)  # the hooks of an epoch's start are called again
        if self.way == "epoch start" and trainer.current_epoch == 1:
            self.save()

    def on_train_batch_start(self, *_: Any) -> None:
        self.save_at("batch start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.save_at("optimizer step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.save_at("batch end")


class SavesInStep(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Saves):
                callback.save_at("step")
        return loss


class SignalInFetch(SyntheticImages):
    """Gets a signal while a batch is on its way to the step."""

    def augment(self, inputs: Tensor) -> Tensor:
        if Saves.way == "signal" and self.trainer.global_step == 25:
            Saves.way = ""
            signal.raise_signal(signal.SIGUSR1)
        return inputs


@pytest.mark.parametrize(
    "way",
    [
        "signal",
        "step",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("batch end", "batch start", "optimizer step", "epoch start")
        ),
    ],
)
def test_a_checkpoint_that_the_user_saves_resumes_exactly(
    train, tmp_path, monkeypatch, way
):
    flags = f"--model {HERE}.SavesInStep --data {HERE}.SignalInFetch"
    flags += f" --trainer.callbacks {HERE}.Saves --trainer.max_epochs 3"
    file = tmp_path / "mine.ckpt"
    before = signal.getsignal(signal.SIGUSR1)
    try:
        train(flags, "--name whole")
        monkeypatch.setattr(Saves, "way", way)
        train(flags, "--trainer.callbacks.file", file)
        assert 18 < torch.load(file, weights_only=True)["global_step"] < 38
        monkeypatch.setattr(Saves, "way", "")
        train("--trust_checkpoint true --name again --ckpt_path", file)
    finally:
        signal.signal(signal.SIGUSR1, before)
    found = checkpoint(tmp_path / "again" / "version_0")
    expected = checkpoint(tmp_path / "whole" / "version_0")
    for part in ("state_dict", "optimizer_states"):
        assert as_lists(found[part]) == as_lists(expected[part])
