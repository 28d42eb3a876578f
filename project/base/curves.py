"""What `System.track` is told of each batch, as curves: a callback, so that no hook of a user can switch it off."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor
from torchmetrics import Metric, MetricCollection

Stage = Literal["train", "val", "test"]
Metrics = dict[str, Metric] | MetricCollection
KEEP = 2**20  # numbers of outputs that wait: one update for many batches costs hardly more than one for a single


class Means:
    """Means over samples, of the loss and other values, and metrics of outputs and targets.

    whole: those of a longer time, which get every batch too and start anew on their own.
    """

    def __init__(self, metrics: MetricCollection, whole: "Means | None" = None) -> None:
        self.metrics, self.whole = metrics, whole
        self.reset()

    def reset(self) -> None:
        self.names: tuple[str, ...] = ()
        self.values: list[Tensor] = []  # of each batch, all names
        self.sizes: list[int] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []  # outputs and targets
        self.num_waiting = 0
        self.sums: Tensor | None = None  # (names + 1,): of the values times samples, and of the samples
        self.has_metrics = False
        self.metrics.reset()

    def add(self, size: int, values: dict[str, Tensor], outputs: Tensor | None, targets: Tensor | None) -> None:
        """values: means over a batch of `size` samples."""
        names = self.names or (self.whole.names if self.whole else ())
        if names and names != tuple(values):
            raise ValueError(f"track() was given {', '.join(values)} now and {', '.join(names)} before")
        self.names = tuple(values)
        self.values += [value.detach() for value in values.values()]
        self.sizes.append(size)
        if outputs is not None and targets is not None and len(self.metrics):
            # a compiled network may use the memory of its outputs again
            self.pairs.append((outputs.detach().clone(), targets.detach()))
            self.num_waiting += outputs.numel()
        if self.num_waiting > KEEP or len(self.sizes) >= 1000:
            self.flush()

    def flush(self) -> None:
        """Into sums and metrics."""
        both = [self, self.whole] if self.whole else [self]
        if self.sizes:
            values = torch.stack(self.values).view(len(self.sizes), -1)
            values = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
            sizes = torch.tensor(self.sizes, dtype=values.dtype, device=values.device)
            sums = torch.cat([(values * sizes[:, None]).sum(0), sizes.sum(0, keepdim=True)])
            for means in both:
                means.names, means.sums = self.names, sums if means.sums is None else means.sums + sums
            self.values, self.sizes = [], []
        if self.pairs:
            if len({(outputs.shape[1:], targets.shape[1:]) for outputs, targets in self.pairs}) == 1:
                all_outputs, all_targets = zip(*self.pairs, strict=True)
                self.pairs = [(torch.cat(all_outputs), torch.cat(all_targets))]
            for means in both:
                means.metrics.to(self.pairs[0][0].device)
                for outputs, targets in self.pairs:
                    means.metrics.update(outputs, targets)
                means.has_metrics = True
            self.pairs, self.num_waiting = [], 0

    def result(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Over all processes, `num_samples` beside them; empty without a batch."""
        self.flush()
        if self.sums is None:
            return {}
        total = reduce(self.sums.clone())
        found = dict(zip(self.names, (total[:-1] / total[-1]).float(), strict=True))
        found |= numbers(self.metrics.compute()) if self.has_metrics else {}
        return found | {"num_samples": total[-1]}

    def state(self) -> dict[str, Any]:
        self.flush()
        # of metrics that torchmetrics can add up; others count from the resume on
        can_add = {n: m for n, m in self.metrics.items() if m.full_state_update is False and not m.dist_sync_on_step}
        states = {name: metric.metric_state for name, metric in can_add.items() if self.has_metrics}
        # on the CPU: other processes may not see this one's GPU
        return move_data_to_device(
            {"names": list(self.names), "sums": self.sums, "metrics": states}, torch.device("cpu")
        )

    def add_state(self, state: dict[str, Any], device: torch.device) -> None:
        if state["sums"] is None:
            return
        state = move_data_to_device(state, device)
        self.names = tuple(state["names"])
        self.sums = state["sums"] if self.sums is None else self.sums + state["sums"]
        self.metrics.to(device)
        for name, saved in state["metrics"].items():
            self.metrics[name].merge_state(saved)


def numbers(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Metrics of one number as they are; those of one for each class as NAME_0, NAME_1, ...; others are no curves."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dim() == 1 and len(value) <= 100:
            found |= {f"{name}_{i}": number for i, number in enumerate(value)}
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            found[name] = torch.as_tensor(value).squeeze()
    return found


class Curves(Callback):
    """Writes train/ and lr on log steps and at the end of each epoch, of the samples since the last point; val/ and
    test/ after each evaluation. What callbacks watch and a terminal shows at the end of an epoch is of all its samples.

    It stands first among the callbacks.
    """

    def __init__(self) -> None:
        self.means: dict[Stage, Means] = {}
        self.epoch = Means(MetricCollection({}))
        self.lr: float | Tensor = 0.0  # of the newest step
        self.resumed: dict[str, list[dict[str, Any]]] = {}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        metrics = collection(pl_module.metrics)
        self.epoch = Means(metrics.clone())
        self.means = {"train": Means(metrics.clone(), self.epoch)}
        self.means |= {name: Means(metrics.clone()) for name in ("val", "test")}
        pl_module.prepare_net()
        # such an epoch has its point at its end
        warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")

    def result(
        self, trainer: Trainer, stage: Stage, means: Means | None = None, keep: bool = False
    ) -> dict[str, Tensor]:
        """The means so far, by their curves' names; unless kept they start anew."""
        means = means or self.means[stage]
        found = means.result(lambda sums: trainer.strategy.reduce(sums, reduce_op="sum"))
        if not keep:
            means.reset()
        return {f"{stage}/{name}": value for name, value in found.items() if stage == "test" or name != "num_samples"}

    def log_train(self, trainer: Any, pl_module: LightningModule) -> None:
        """On a log step. A mean over a few batches would be noise: shortly before the end of an epoch the samples stay
        for the epoch's point, too, and shortly after it they still count for the next log step."""
        pl_module.log("lr", self.lr)
        num_left = trainer.num_training_batches - trainer.fit_loop.batch_idx - 1
        keep = 0 < num_left < batches_between_points(trainer) / 2
        pl_module.log_dict(self.result(trainer, "train", keep=keep), prog_bar=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, means in (("train", self.means["train"]), ("epoch", self.epoch)):
            # it may have been another number of processes
            for state in self.resumed.get(name, [])[trainer.global_rank :: trainer.world_size]:
                means.add_state(state, pl_module.device)
        self.resumed = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        every = batches_between_points(trainer)
        until_next = -trainer.global_step * trainer.accumulate_grad_batches % every if every else 0
        keep = trainer.num_training_batches > every and until_next < every / 2
        if point := self.result(trainer, "train", keep=keep):  # none right after a log step
            values = {name: float(value) for name, value in {"lr": self.lr, **point}.items()}
            for logger in trainer.loggers:
                logger.log_metrics(values, trainer.fit_loop.epoch_loop._batches_that_stepped - 1)  # as Lightning counts
        # equal in all processes already, but Lightning warns without sync_dist
        pl_module.log_dict(self.result(trainer, "train", self.epoch), prog_bar=True, logger=False, sync_dist=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        found = self.result(trainer, "val")
        for name, value in found.items():
            # equal in all processes already, but Lightning warns without sync_dist
            pl_module.log(name, value, prog_bar=name != "val/loss", sync_dist=True)
        if found and trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.step_plateau(found)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log_dict(self.result(trainer, "test"), sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        own = {"train": self.means["train"].state(), "epoch": self.epoch.state()}
        states: list[Any] = [own]
        if dist.is_initialized():
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, own)
        return {name: [state[name] for state in states] for name in own} | {"lr": float(self.lr)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lr = state_dict.get("lr", 0.0)
        self.resumed = {name: state_dict.get(name, []) for name in ("train", "epoch")}  # the latter is younger


def batches_between_points(trainer: Trainer) -> int:
    return trainer.log_every_n_steps * trainer.accumulate_grad_batches  # type: ignore[attr-defined]


def collection(metrics: Metrics | Metric | None) -> MetricCollection:
    """torchmetrics' collection of what `System.metrics` may be."""
    if not isinstance(metrics, dict):
        return metrics if isinstance(metrics, MetricCollection) else MetricCollection(metrics or {})
    ordered = MetricCollection({})
    for name, metric in metrics.items():  # all at once they would be sorted by name
        ordered.add_metrics({name: metric})
    return ordered
