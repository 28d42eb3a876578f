"""The curves of a training, and what callbacks need to know of a run."""

import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import MetricCollection

from lightbase.core.compat import logged_step
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, say
from lightbase.core.metrics import Accumulator, check_names, collection, in_keys
from lightbase.core.transfer import shortened


class MayMissSteps(Callback):
    """A callback whose batch hooks need not see each step.

    With `--steps_per_execution 20` its `on_train_batch_start` and `on_train_batch_end`
    are called once for 20 steps, with the first batch and the outputs of the last step.
    For any other callback with such a hook the run takes single steps.
    """


class RunFolder(Callback):
    """Gives all processes the folder of the run, which the first process has made; in a
    fast_dev_run a temporary one."""

    temporary: tempfile.TemporaryDirectory | None = None

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.path is None and trainer.is_global_zero:
            self.temporary = tempfile.TemporaryDirectory(prefix="fast_dev_run_")
            self.path = Path(self.temporary.name)
        self.path = trainer.strategy.broadcast(self.path)

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        if self.temporary:
            self.temporary.cleanup()
            self.temporary = self.path = None


def run_folder(trainer: Trainer) -> Path:
    """The run's folder, where a callback may write, from `on_fit_start` or
    `on_test_start` on.

    Unlike `trainer.log_dir`, one process may call this without the others. In
    evaluate.py it is `trainer.default_root_dir`.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunFolder) and callback.path:
            return callback.path
    return Path(trainer.default_root_dir)


def gather(value: Any) -> list[Any]:
    """The values of all processes, by rank. All processes must call this."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def num_steps(trainer: Any) -> int:
    """Steps so far, as the curves count them. With manual optimization these are
    batches, because `global_step` counts the steps of each optimizer."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step  # type: ignore[no-any-return]
    return trainer.fit_loop.total_batch_idx + 1  # type: ignore[no-any-return]


def newest_step(trainer: Any) -> int:
    """The last step, from 0: where Lightning's own curves have its point."""
    return max(0, num_steps(trainer) - 1)


def log_values(
    trainer: Any, values: Mapping[str, Any], step: int | None = None
) -> None:
    """Write points of curves, {curve: value}, to all loggers; at the newest step by
    default."""
    for logger in trainer.loggers:
        logger.log_metrics(values, newest_step(trainer) if step is None else step)


Stage = Literal["train", "val", "test"]


class Curves(MayMissSteps):
    """Writes the points of all curves. train/ and lr get a point on log steps and at
    the end of each epoch, of the samples since the last point; val/ and test/ after
    each evaluation.

    At the end of an epoch, callbacks and the terminal see means over the whole epoch.
    This callback must be the first one.
    """

    def __init__(self) -> None:
        self.means: dict[Stage, Accumulator] = {}
        self.epoch = Accumulator(MetricCollection({}))
        self.rates: dict[
            str, float | Tensor
        ] = {}  # of the last step, by the curves' names
        self.logged: set[str] = set()  # names that the module gives to self.log
        self.resumed: dict[str, list[dict[str, Any]]] = {}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        metrics, data = collection(pl_module.metrics), trainer.datamodule  # type: ignore[attr-defined]
        classes = data.classes if isinstance(data, BaseDataModule) else None
        self.epoch = Accumulator(metrics.clone(), None, classes)
        for name in get_args(Stage):
            epoch = self.epoch if name == "train" else None
            self.means[name] = Accumulator(metrics.clone(), epoch, classes)
        pl_module.prepare_net(trains=stage == "fit")
        # an epoch without a log step has a point at its end
        warnings.filterwarnings(
            "ignore",
            "The number of training batches .* is smaller than the logging interval",
        )

    def result(
        self,
        trainer: Trainer,
        stage: Stage,
        means: Accumulator | None = None,
        keep: bool = False,
    ) -> dict[str, Any]:
        """The points of a stage, by the names of their curves. The accumulator, `means`
        or that of the stage, is reset, unless `keep`."""
        means = means or self.means[stage]
        check_all_track(trainer, stage, bool(means.sizes) or means.sums is not None)
        values = means.result(
            lambda sums: trainer.strategy.reduce(sums, reduce_op="sum")
        )
        if not keep:
            means.reset()
        if stage != "test":
            values.pop("num_samples", None)
        points: dict[str, Any] = {}
        for name, value in values.items():
            # the values of single classes are a group in TensorBoard: val_class_acc/cat
            is_of_one_class = name in means.class_curves
            points[f"{stage}_{name}" if is_of_one_class else f"{stage}/{name}"] = value
        check_names([*points, *self.logged])
        return points

    def log_train(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write a point on a log step. A mean over few batches would be noise. So, near
        the end of an epoch, the samples are kept for the point at its end, too."""
        num_left = trainer.num_training_batches - trainer.fit_loop.batch_idx - 1
        keep = 0 < num_left < batches_between_points(trainer) / 2
        with trainer.profiler.profile("logging"):
            point = self.result(trainer, "train", keep=keep)
            if not point:  # no process calls `track` in training
                return
            # One transfer to the CPU: Lightning reads the values of the progress bar
            # after every batch, and would wait for the GPU.
            device = next(iter(point.values())).device  # of the sums
            values = torch.stack([value.to(device) for value in point.values()]).cpu()
            for name, rate in self.rates.items():
                LightningModule.log(pl_module, name, torch.as_tensor(rate))
            for name, value in zip(point, values, strict=True):
                LightningModule.log(
                    pl_module, name, value, prog_bar=not is_of_class(name)
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(groups := parameter_groups(trainer)) > 1:
            say(
                "\n".join(
                    describe_group(name, group, pl_module) for name, group in groups
                )
            )

    def note_rates(self, trainer: Trainer) -> None:
        """Remember the rates of the step that comes next, after which `track` is
        called."""
        groups = parameter_groups(trainer)
        self.rates = {f"lr/{name}".rstrip("/"): group["lr"] for name, group in groups}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, means in (("train", self.means["train"]), ("epoch", self.epoch)):
            # the number of processes may have changed
            for state in self.resumed.get(name, [])[
                trainer.global_rank :: trainer.world_size
            ]:
                means.add_state(state, pl_module.device)
        self.resumed = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        # Several processes come here in each batch, also if one of them does not call
        # `track`.
        if trainer.world_size > 1 and is_log_step(pl_module):
            self.log_train(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        every = batches_between_points(trainer)
        until_next = (
            -logged_step(trainer) * trainer.accumulate_grad_batches % every
            if every
            else 0
        )
        # Shortly before a log step, the samples are kept for its point.
        keep = trainer.num_training_batches > every and until_next < every / 2
        if point := self.result(
            trainer, "train", keep=keep
        ):  # empty right after a log step
            values = {
                name: float(value) for name, value in {**self.rates, **point}.items()
            }
            log_values(trainer, values)
        # The values are equal in all processes, but without sync_dist Lightning warns.
        for name, value in self.result(trainer, "train", self.epoch).items():
            options: Any = {"prog_bar": not is_of_class(name), "logger": False}
            LightningModule.log(pl_module, name, value, sync_dist=True, **options)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Any) -> None:
        # a MinMaxMetric would keep the values of the sanity check
        metrics = collection(pl_module.metrics).clone()
        self.means["val"] = Accumulator(metrics, None, self.means["val"].classes)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        for name, value in self.result(trainer, "val").items():
            in_bar = name != "val/loss" and not is_of_class(name)
            LightningModule.log(pl_module, name, value, prog_bar=in_bar, sync_dist=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        for name, value in self.result(trainer, "test").items():
            LightningModule.log(pl_module, name, value, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        states = gather(
            {"train": self.means["train"].state(), "epoch": self.epoch.state()}
        )
        return {
            "train": [state["train"] for state in states],
            "epoch": [state["epoch"] for state in states],
            "rates": {name: float(rate) for name, rate in self.rates.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rates = state_dict["rates"]
        self.resumed = {name: state_dict[name] for name in ("train", "epoch")}


def parameter_groups(trainer: Trainer) -> list[tuple[str, dict[str, Any]]]:
    """The parameter groups of all optimizers, with names for their curves; "" if it is
    one."""
    names, groups = [], []
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            parts = [f"optimizer_{i}"] if len(trainer.optimizers) > 1 else []
            parts += [f"group_{j}"] if len(optimizer.param_groups) > 1 else []
            names.append(str(group.get("name", "_".join(parts))))
            groups.append(group)
    return [*zip(names if names == [""] else in_keys(names), groups, strict=True)]


def describe_group(name: str, group: dict[str, Any], model: LightningModule) -> str:
    names = {
        id(value): name.removeprefix("net.") for name, value in model.named_parameters()
    }
    parameters = group["params"]
    first = shortened([names.get(id(value), "unnamed") for value in parameters])
    num = sum(value.numel() for value in parameters if not is_lazy(value))
    # a schedule may start below the group's rate
    lr = group.get("max_lr", group.get("initial_lr", group["lr"]))
    is_frozen = not any(value.requires_grad for value in parameters)
    note = "; it is frozen, so the group has no effect" if is_frozen else ""
    return (
        f"Parameter group {name}: {num:,} parameters ({first}), lr {float(lr):g}{note}"
    )


def check_all_track(trainer: Trainer, stage: Stage, has_samples: bool) -> None:
    """Raise UserError in all processes if only some of them have samples: the others
    would wait for ever for the sums of those."""
    if trainer.world_size > 1:
        count = torch.tensor(float(has_samples), device=trainer.strategy.root_device)
        count = trainer.strategy.reduce(count, reduce_op="sum")
        if 0 < count < trainer.world_size:
            what = f"{int(count)} of {trainer.world_size} processes called track({stage!r}, ...)"
            raise UserError(
                what, "call it in each process, for its share of the batches"
            )


def is_of_class(name: str) -> bool:
    """Whether a curve is of a single class. The terminal does not show them: they are
    too many."""
    # Lightning adds dataloader_idx_1 to the values of a second loader
    return re.match("(train|val|test)_[^/]+/(?!dataloader_idx_)", name) is not None


def batches_between_points(trainer: Trainer) -> int:
    return trainer.log_every_n_steps * trainer.accumulate_grad_batches  # type: ignore[attr-defined]


def is_log_step(module: Any) -> bool:
    """Whether this batch is the last of an optimizer step after which Lightning
    logs."""
    trainer = module.trainer
    every = trainer.log_every_n_steps
    if not every or (logged_step(trainer) + 1) % every:
        return False
    num_batches = trainer.fit_loop.batch_idx + 1
    is_step = (
        num_batches % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
    )
    return bool(is_step)
