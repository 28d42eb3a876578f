"""The LightningModule around any classification network: loss, metrics, optimiser, schedule."""

import math
from typing import Any, Literal

import torch
from jsonargparse.typing import ClosedUnitInterval, PositiveFloat
from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import SumMetric

from project.base.optim import build_optimizer, build_scheduler, schedule_at
from project.engine.steps import step_maker, train_batches

Batch = tuple[Tensor, Tensor]


class Classifier(LightningModule):
    """Trains `net` with cross-entropy.

    Logged: train/loss, train/acc (means over the samples since the last log step) and lr on every log step;
    val/loss and val/acc after every validation; test/loss, test/acc and test/num_samples after a test.

    Args:
        net: The network: inputs (N, ...) to logits (N, classes).
        lr: Learning rate.
        optimizer: A class of torch.optim, such as SGD, Adam or AdamW, or the import path of another one.
        optimizer_args: Its other arguments, such as {momentum: 0.9}.
        scheduler: A class of torch.optim.lr_scheduler, such as CosineAnnealingLR; or WarmupCosineLR (linear warm-up,
            then cosine), or FinalDecayLR (constant, then down to 0); or the import path of another one. None keeps
            the learning rate.
        scheduler_args: Its arguments, such as {warmup_steps: 500}. The length of the training (T_max, total_steps)
            is filled in. ReduceLROnPlateau watches val/loss, with {mode: max} val/acc.
        scheduler_interval: Step the scheduler after every "epoch" or every "step".
        label_smoothing: Share of the target spread over all classes, in training only, in [0, 1].
        channels_last: Keep images and convolutions' weights as (N, H, W, C) in memory, which is mostly faster.
        compile_net: Compile the network with this backend of torch.compile, "inductor" for instance.
    """

    def __init__(
        self,
        net: nn.Module,
        lr: PositiveFloat = 0.01,
        optimizer: str = "SGD",
        optimizer_args: dict[str, Any] | None = None,
        scheduler: str | None = None,
        scheduler_args: dict[str, Any] | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        label_smoothing: ClosedUnitInterval = 0.0,
        channels_last: bool = True,
        compile_net: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"], logger=False)
        self.net = net
        self.lr = float(lr)
        self.optimizer = optimizer
        self.optimizer_args = optimizer_args or {}
        self.scheduler = scheduler
        self.scheduler_args = scheduler_args or {}
        self.scheduler_interval = scheduler_interval
        self.label_smoothing = float(label_smoothing)
        self.channels_last = channels_last
        self.compile_net = compile_net
        # sums over an evaluation; a loss that is not a number stays one
        self.eval_loss = SumMetric(nan_strategy="disable")
        self.eval_correct = SumMetric()
        self.eval_samples = SumMetric()
        self.train_sums = {"loss": torch.zeros(()), "correct": torch.zeros(()), "samples": torch.zeros(())}
        """Sums since the last log step."""
        self.last_log_step = 0
        self.cuda_graph = False
        """Whether several steps in one call are replayed as a CUDA graph, on a GPU."""
        # a wrong argument is found here, before anything has been written
        if compile_net and compile_net not in torch.compiler.list_backends(exclude_tags=()):
            raise ValueError(f"compile_net {compile_net!r} is no backend of torch.compile; inductor is the usual one")
        schedule_at(3, optimizer, self.optimizer_args, self.lr, scheduler, self.scheduler_args, num_steps=100)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def setup(self, stage: str) -> None:
        if self.channels_last:
            for parameter in self.net.parameters():
                if not is_lazy(parameter) and parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if self.compile_net and self.net._compiled_call_impl is None:
            self.net.compile(backend=self.compile_net)  # in place: torch.compile(net) would rename the weights

    def on_train_start(self) -> None:
        # copies: with ddp_spawn all processes have the same memory
        self.train_sums = {name: value.to(self.device, copy=True) for name, value in self.train_sums.items()}
        if not self.automatic_optimization:
            self.make_step = step_maker(self, self.cuda_graph and self.device.type == "cuda")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # the schedule moves on before the step is logged
        self.step_lr = self.trainer.optimizers[0].param_groups[0]["lr"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if not self.automatic_optimization:  # several batches
            train_batches(self, batch)
            return None
        return self.loss(*batch)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The training loss of a batch, also added to the sums behind train/loss and train/acc."""
        logits = self.net(x).float()
        loss = functional.cross_entropy(logits, y, label_smoothing=self.label_smoothing)
        self.train_sums["loss"] += loss.detach() * len(y)
        self.train_sums["correct"] += (logits.detach().argmax(1) == y).sum()
        self.train_sums["samples"] += len(y)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        # Logging costs more than the step of a small network, so it happens on log steps only. With accumulated
        # gradients several batches end at the same step.
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or self.global_step % every or self.global_step == self.last_log_step:
            return
        values = self.train_metrics()
        self.log("lr", values.pop("lr"))
        self.log_dict(values, prog_bar=True)

    def train_metrics(self) -> dict[str, Any]:
        """train/loss and train/acc over the samples since the last call, and lr."""
        sums = self._total_train_sums()
        for value in self.train_sums.values():
            value.zero_()  # in place: a CUDA graph adds to this memory
        self.last_log_step = self.global_step
        return {
            "train/loss": sums["loss"] / sums["samples"],
            "train/acc": sums["correct"] / sums["samples"],
            "lr": self.step_lr,
        }

    def _total_train_sums(self) -> dict[str, Tensor]:
        """The sums of all processes together."""
        total = self.trainer.strategy.reduce(torch.stack(list(self.train_sums.values())), reduce_op="sum")
        return dict(zip(self.train_sums, total, strict=True))

    def on_validation_epoch_start(self) -> None:
        self._reset_evaluation()

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluation_step(batch)

    def on_validation_epoch_end(self) -> None:
        values = self._evaluation_result()
        # equal in all processes already, but Lightning warns without sync_dist
        self.log("val/loss", values["loss"], sync_dist=True)
        self.log("val/acc", values["acc"], prog_bar=True, sync_dist=True)
        # Lightning would step it after the epoch's checkpoint is written, and a resumed run would miss that step
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking
        scheduler = self.lr_schedulers() if is_fitting else None
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(values["acc" if scheduler.mode == "max" else "loss"])

    def on_test_epoch_start(self) -> None:
        self._reset_evaluation()

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluation_step(batch)

    def on_test_epoch_end(self) -> None:
        self.log_dict({f"test/{name}": value for name, value in self._evaluation_result().items()}, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The probability of each class, (N, classes)."""
        return self.net(batch[0]).float().softmax(1)

    def _reset_evaluation(self) -> None:
        # at the start: metrics come to the processes of ddp_spawn in memory that they share
        for metric in (self.eval_loss, self.eval_correct, self.eval_samples):
            metric.reset()

    def _evaluation_step(self, batch: Batch) -> Tensor:
        """The logits (N, classes), for callbacks."""
        x, y = batch
        logits = self.net(x).float()
        self.eval_loss.update(functional.cross_entropy(logits, y, reduction="sum"))
        self.eval_correct.update((logits.argmax(1) == y).sum())
        self.eval_samples.update(len(y))
        return logits

    def _evaluation_result(self) -> dict[str, Tensor]:
        # sums over all processes
        loss, num_correct, num_samples = (
            metric.compute() for metric in (self.eval_loss, self.eval_correct, self.eval_samples)
        )
        return {"loss": loss / num_samples, "acc": num_correct / num_samples, "num_samples": num_samples}

    def configure_optimizers(self) -> Any:
        # Lightning cannot clip gradients that a fused optimiser takes the scale off (its issue 21435)
        clips = self.trainer.gradient_clip_val and str(self.trainer.precision).endswith("-mixed")
        kind = {"fused": not clips, "capturable": self.cuda_graph and self.device.type == "cuda"}
        optimizer = build_optimizer(self.optimizer, self.optimizer_args, self.net.parameters(), self.lr, **kind)
        if self.scheduler is None:
            return optimizer
        scheduler = build_scheduler(self.scheduler, self.scheduler_args, optimizer, self._num_scheduler_steps())
        config: dict[str, Any] = {"scheduler": scheduler}
        if self.automatic_optimization:
            config |= {"interval": self.scheduler_interval, "reduce_on_plateau": False}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _num_scheduler_steps(self) -> int | None:
        """How often the scheduler steps in the whole training; None if the training has no end.

        Lightning's estimated_stepping_batches would start the loaders, before a resumed run knows its epoch.
        """
        trainer: Any = self.trainer
        loader = trainer.datamodule.train_dataloader() if trainer.datamodule else None
        if loader is None:
            return int(min(trainer.estimated_stepping_batches, 2**31))
        limit = trainer.limit_train_batches
        total = getattr(loader.batch_sampler, "num_batches", len(loader))  # one call may train several
        num_batches = min(total, limit) if isinstance(limit, int) else int(total * limit)
        steps_per_epoch = max(1, math.ceil(num_batches / trainer.accumulate_grad_batches))
        ends = [trainer.max_epochs * steps_per_epoch] if (trainer.max_epochs or -1) >= 0 else []
        ends += [trainer.max_steps] if trainer.max_steps >= 0 else []
        if not ends:
            return None
        return min(ends) if self.scheduler_interval == "step" else math.ceil(min(ends) / steps_per_epoch)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):  # that one steps after validation
            super().lr_scheduler_step(scheduler, metric)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["train_sums"] = {name: value.item() for name, value in self._total_train_sums().items()}
        checkpoint["last_log_step"] = self.last_log_step
        checkpoint["steps_per_execution"] = getattr(self.trainer.datamodule, "steps_per_execution", 1)  # type: ignore[attr-defined]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:  # they are the sums of all processes
            self.train_sums = {name: torch.tensor(value) for name, value in checkpoint["train_sums"].items()}
        self.last_log_step = checkpoint["last_log_step"]
        for state in checkpoint.get("optimizer_states", ()):
            for group in state["param_groups"]:
                group["lr"] = float(group["lr"])  # with a CUDA graph it is a tensor
        if self.trainer.state.fn == TrainerFn.FITTING and self.scheduler and checkpoint["lr_schedulers"]:
            self._stretch_schedule(checkpoint)

    def _stretch_schedule(self, checkpoint: dict[str, Any]) -> None:
        """If the training has become longer or shorter, put the schedule where it would be had it always been so."""
        num_steps = self._num_scheduler_steps()
        (saved,) = checkpoint["lr_schedulers"]
        is_given = {"T_max", "total_steps"} & self.scheduler_args.keys()
        if is_given or num_steps is None or saved.get("T_max", saved.get("total_steps", num_steps)) == num_steps:
            return
        optimizer, scheduler = schedule_at(
            *(saved["last_epoch"], self.optimizer, self.optimizer_args, self.lr),
            *(self.scheduler, self.scheduler_args, num_steps),
        )
        assert scheduler is not None
        checkpoint["lr_schedulers"] = [scheduler.state_dict()]
        for group in checkpoint["optimizer_states"][0]["param_groups"]:
            group.update({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
