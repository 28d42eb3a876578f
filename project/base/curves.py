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
    """Means over samples, of the loss and other values, and metrics of outputs and targets."""

    def __init__(self, metrics: MetricCollection) -> None:
        self.metrics = metrics
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
        if self.names and self.names != tuple(values):
            raise ValueError(f"track() was given {', '.join(values)} now and {', '.join(self.names)} before")
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
        if self.sizes:
            values = torch.stack(self.values).view(len(self.sizes), -1)
            values = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
            sizes = torch.tensor(self.sizes, dtype=values.dtype, device=values.device)
            sums = torch.cat([(values * sizes[:, None]).sum(0), sizes.sum(0, keepdim=True)])
            self.sums = sums if self.sums is None else self.sums + sums
            self.values, self.sizes = [], []
        if self.pairs:
            self.metrics.to(self.pairs[0][0].device)
            if len({(outputs.shape[1:], targets.shape[1:]) for outputs, targets in self.pairs}) == 1:
                all_outputs, all_targets = zip(*self.pairs, strict=True)
                self.pairs = [(torch.cat(all_outputs), torch.cat(all_targets))]
            for outputs, targets in self.pairs:
                self.metrics.update(outputs, targets)
            self.has_metrics = True
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
    """Writes train/ on log steps, and at the end of an epoch that had none; val/ and test/ after each evaluation.

    It stands first among the callbacks.
    """

    def __init__(self) -> None:
        self.means: dict[Stage, Means] = {}
        self.has_logged = False  # train/, in this epoch
        self.resumed: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        metrics = collection(pl_module.metrics)
        self.means = {name: Means(metrics.clone()) for name in ("train", "val", "test")}
        pl_module.prepare_net()
        # such an epoch has its point at its end
        warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")

    def result(self, trainer: Trainer, stage: Stage) -> dict[str, Tensor]:
        """The means so far, by their curves' names; they start anew."""
        found = self.means[stage].result(lambda sums: trainer.strategy.reduce(sums, reduce_op="sum"))
        self.means[stage].reset()
        return {f"{stage}/{name}": value for name, value in found.items() if stage == "test" or name != "num_samples"}

    def log_train(self, trainer: Trainer, pl_module: LightningModule, at_epoch_end: bool = False) -> None:
        # equal in all processes already, but Lightning warns without sync_dist
        pl_module.log_dict(self.result(trainer, "train"), prog_bar=True, sync_dist=at_epoch_end)
        self.has_logged = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for state in self.resumed[trainer.global_rank :: trainer.world_size]:  # it may have been another number
            self.means["train"].add_state(state, pl_module.device)
        self.resumed = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.has_logged:
            self.log_train(trainer, pl_module, at_epoch_end=True)
        self.has_logged = False

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
        states: list[Any] = [self.means["train"].state()]
        if dist.is_initialized():
            own, states = states[0], [None] * dist.get_world_size()
            dist.all_gather_object(states, own)
        return {"train": states, "has_logged": self.has_logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed, self.has_logged = state_dict["train"], state_dict["has_logged"]


def collection(metrics: Metrics | Metric | None) -> MetricCollection:
    """torchmetrics' collection of what `System.metrics` may be."""
    if not isinstance(metrics, dict):
        return metrics if isinstance(metrics, MetricCollection) else MetricCollection(metrics or {})
    ordered = MetricCollection({})
    for name, metric in metrics.items():  # all at once they would be sorted by name
        ordered.add_metrics({name: metric})
    return ordered
