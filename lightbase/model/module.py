"""The base class of a project's LightningModules: optimizer, schedule, curves.

A subclass writes the steps, and calls `track` in them: read `BaseModule` and its method
`track` first. docs/extending.md has examples. Lightning and the callback `Curves` call
the other methods.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TypeGuard

import torch
from jsonargparse.typing import PositiveFloat
from lightning import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

import lightbase
from lightbase.compat import newest_batch, round_as_eager
from lightbase.config.errors import UserError, say
from lightbase.data.module import in_units
from lightbase.data.tensors import inputs_of, map_tensors, plain_numbers
from lightbase.model.curves import Curves, Stage
from lightbase.model.metrics import Metrics, collection, counted_loss
from lightbase.model.optim import (
    MADE_FOR_STEPS,
    build_optimizer,
    build_scheduler,
    grouped,
    length_argument,
    schedule_length,
)
from lightbase.model.transfer import freeze_parameters, load_weights

MIXED = ("16", "bf16", "16-mixed", "bf16-mixed")
"""Precisions of the Trainer in which the weights stay float32."""


class BaseModule(LightningModule):
    """Trains the network `net` with the loss `criterion`, and measures `metrics`.

    A subclass may assign other values to `criterion`, `metrics`, `lr`, `optimizer` and
    `scheduler` in its constructor. `optimizer` and `scheduler` may be objects, too.

    The steps call `track`, which makes these curves: train/ has points on log steps,
    means over the samples since the last point. val/ has a point after each validation.
    test/ and test/num_samples have a point after a test. lr has the same points as
    train/.

    Args:
        net: The network.
        criterion: The loss of outputs and targets, in all stages. It has to be a mean
            over the samples of a batch. With class weights or a sum, val/loss depends
            on the batch size. Targets that it ignores (ignore_index) count neither in
            val/loss nor in metrics. It is not needed if the steps do not use it.
        metrics: Metrics with their names, such as {f1: {class_path:
            torchmetrics.classification.MulticlassF1Score}}.
        lr: The learning rate.
        optimizer: A class of torch.optim, such as SGD, Adam or AdamW, or the import
            path of another one.
        optimizer_args: The other arguments of the optimizer, such as {momentum: 0.9}.
        parameter_groups: Other options for some parameters, such as {head: {lr: 0.1},
            norms_and_biases: {weight_decay: 0}}. A key is the first part of the names
            of parameters, or a pattern ("*.bias"). norms_and_biases selects all
            parameters with one dimension.
        scheduler: A class of torch.optim.lr_scheduler, such as CosineAnnealingLR, or
            the import path of another one. Two more are WarmupCosineLR (a linear
            warm-up, then a cosine) and FinalDecayLR (constant, then linear to 0). None
            keeps the learning rate.
        scheduler_args: The arguments of the scheduler, such as {warmup_steps: 500}. The
            length of the training (T_max, total_steps, or total_iters of PolynomialLR)
            and the highest rate (max_lr, which is lr) are filled in. ReduceLROnPlateau
            watches val/loss, or with {mode: max} the first metric.
        scheduler_interval: Whether the scheduler steps after every "epoch" or every
            "step". By default OneCycleLR, CyclicLR, WarmupCosineLR and FinalDecayLR
            step after every step, and others after every epoch.
        channels_last: Keep images and the weights of convolutions as (N, H, W, C) in
            memory. This is faster for most networks.
        compile_net: Compile the network with this backend of torch.compile, such as
            "inductor".
        compile_mode: The mode of torch.compile, such as "reduce-overhead", which
            launches CUDA graphs, or "max-autotune".
        weights: A file: a checkpoint, a state_dict or *.safetensors. A new training
            starts with its tensors, where name and shape fit.
        freeze: First parts of names, or patterns, such as [conv1, "*.bias"]. These
            parameters are not trained. A module stays in eval mode if all its
            parameters are frozen.
    """

    task: (
        Literal["multiclass", "multilabel", "segmentation", "regression", "text"] | None
    ) = None
    """The meaning of outputs and targets. Pictures, evaluate.py --report and predict.py
    need it; docs/tensorboard.md lists the shapes."""
    gives_probabilities: bool | None = None
    """Whether the outputs that the steps give to `track` are probabilities. By default
    they are with BCELoss, and otherwise logits if torch's losses or `task` say so."""
    optimizer: str | Optimizer | Callable[..., Optimizer]
    scheduler: str | LRScheduler | None
    # the outputs and targets that `track` got in the newest step of an evaluation
    tracked: tuple[Any, Any] | None = None

    def __init__(
        self,
        net: nn.Module,
        criterion: nn.Module | None = None,
        metrics: Metrics | Metric | None = None,
        lr: PositiveFloat = 0.01,
        optimizer: str = "SGD",
        optimizer_args: dict[str, Any] | None = None,
        parameter_groups: dict[str, dict[str, Any]] | None = None,
        scheduler: str | None = None,
        scheduler_args: dict[str, Any] | None = None,
        scheduler_interval: Literal["epoch", "step"] | None = None,
        channels_last: bool = True,
        compile_net: str | None = None,
        compile_mode: str | None = None,
        weights: Path | None = None,
        freeze: list[str | int] | str | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.criterion = criterion or nn.Identity()
        self.metrics = metrics or {}
        self.lr = float(lr)
        self.optimizer = optimizer
        self.optimizer_args = plain_numbers(optimizer_args or {})
        groups = plain_numbers(parameter_groups or {})
        self.parameter_groups = {str(name): groups[name] for name in groups}
        self.scheduler = scheduler
        self.scheduler_args = plain_numbers(scheduler_args or {})
        self.scheduler_interval = scheduler_interval
        self.channels_last = channels_last
        self.compile_net = compile_net
        self.compile_mode = compile_mode
        self.weights_file = weights
        if isinstance(freeze, str):
            freeze = [*freeze.split(",")]
        self.frozen_names = [str(name).strip() for name in freeze or []]
        self.frozen_modules: list[nn.Module] = []
        self.has_weights = False
        self.is_compiled = False
        self.curves_callback = Curves()  # in a run, `make_trainer` places it
        if compile_mode is not None and compile_net is None:
            raise UserError(
                f"compile_mode {compile_mode} needs --model.compile_net inductor",
                status=2,
            )

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        trust: bool = False,
        **arguments: Any,
    ) -> Self:
        """Return a module with the weights of a checkpoint. It is built from
        `arguments`, the arguments of the constructor, or without any from the config in
        the file, as by `lightbase.load`.

        map_location: The device of the module. By default it is the CPU.
        strict: If False, the file may lack some tensors, which keep their initial
            values. It has an effect only with `arguments`.
        hparams_file, weights_only: Lightning's. Only weights are read, so they must not
            be a file or False.
        trust: See `lightbase.load`.

        Raise UserError if the file is of another class, or cannot be used.
        """
        if hparams_file is not None or weights_only is False:
            raise UserError(
                "load_from_checkpoint reads weights only: give the arguments by name"
            )
        module: Any
        if arguments:
            module = cls(**arguments)
            load_weights(module, Path(checkpoint_path), is_complete=strict is not False)
        else:
            module, _ = lightbase.load(checkpoint_path, trust=trust)
            if not isinstance(module, cls):
                raise UserError(f"{checkpoint_path} is of a {type(module).__name__}")
        if map_location is not None:
            module.to(map_location)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs (N, ...)."""
        return self.net(x)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of all modules. Frozen modules stay in eval mode, so
        that dropout is off and BatchNorm keeps its statistics."""
        super().train(mode)
        for module in self.frozen_modules:
            module.eval()
        return self

    def track(
        self,
        stage: Stage,
        loss: Tensor,
        outputs: Any = None,
        targets: Any = None,
        **values: Any,
    ) -> None:
        """Add a batch to the curves of a stage: the loss, the metrics, and values with
        a name. Call this once in each step. `Curves` writes the points.

        A point is a mean over samples, so each batch counts with its number of samples:
        the length of the first tensor of `targets`, `outputs` and the inputs of the
        batch. Without a tensor it is the length of a list, or of the first tensor in a
        tuple. The loss of a validation or test counts with its number of targets that
        are not ignored.

        loss: The mean over the batch, a tensor with one number. It is the curve
            stage/loss.
        outputs, targets: The arguments for the metrics, mostly (N, ...). Metrics may
            take other types, such as lists with an entry for each sample. Without them
            this stage has no metrics. With data.scale_targets, metrics and pictures get
            both in the units of the data.
        values: Other means over the batch, tensors or numbers, by name. A value `NAME`
            is the curve stage/NAME.

        Raise UserError if `loss` has several numbers.
        """
        if isinstance(outputs, Tensor):
            outputs = outputs.detach()
        else:
            outputs = map_tensors(Tensor.detach, outputs)
        curves = self.curves_callback
        if not curves.means:  # called without a Trainer
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        outputs, targets = in_units(data, (outputs, targets))
        if stage != "train":
            self.tracked = outputs, targets
        sums = curves.means[stage]
        if loss.numel() > 1:
            raise UserError(
                f"loss must be a scalar, got shape {tuple(loss.shape)}",
                'set reduction="mean"',
            )
        means = {"loss": loss}
        if stage != "train":
            means = counted_loss(loss, targets, curves.ignored_target)
        for name, value in values.items():
            if not isinstance(value, Tensor):
                # new_full fills on the GPU: copying a number there would wait
                value = loss.new_full((), value)
            means[name] = value.to(loss)
        if isinstance(targets, Tensor) and targets.dim():
            num = len(targets)  # faster than what follows
        else:
            num = num_samples(targets, outputs, newest_batch(self.trainer))
        sums.add(num, means, outputs, targets)

    def ignored_target(self) -> int | None:
        """Return the target that metrics and pictures have to ignore: the
        `ignore_index` of the loss, else of a metric. Without any it is -100, which
        torch's functions ignore, or None for a loss of torch that ignores nothing."""
        for part in (*self.modules(), *collection(self.metrics).modules()):
            index = vars(part).get("ignore_index")
            if isinstance(index, int):
                return index
        if type(self.criterion).__module__ == "torch.nn.modules.loss":
            return None
        return -100

    def prepare_weights(self) -> None:
        """Load the file of the argument `weights`, and freeze parameters, if that is
        not done yet. It is called before each fit, and also before a run makes its
        folder, so that a mistake ends the run early."""
        # a second fit continues with the weights of the first one
        if self.weights_file is not None and not self.has_weights:
            load_weights(self.net, Path(self.weights_file))
            self.has_weights = True
        if self.frozen_names:
            self.frozen_modules = freeze_parameters(self, self.frozen_names)
            self.frozen_names = []

    def prepare_net(self, trains: bool) -> None:
        """Prepare the network: weights, memory layout, compilation.

        The callback Curves calls this before each fit or test. Lightning's hooks do not
        serve, because a subclass may override them without calling super().

        trains: Whether a training follows. Only a training loads and freezes weights.
        """
        if trains:
            self.prepare_weights()
        if self.channels_last:
            tensors: list[Tensor] = [*self.net.parameters()]
            # on a CPU another layout of the buffers changes the last digits of results
            if self.trainer.strategy.root_device.type != "cpu":
                tensors += self.net.buffers()
            for tensor in tensors:
                if not is_lazy(tensor) and tensor.dim() == 4:
                    tensor.data = tensor.data.contiguous(
                        memory_format=torch.channels_last
                    )
        if self.compile_net and not self.is_compiled:
            # torch.compile(net) would change the names of the weights. Without
            # dynamic=False, an evaluation with another batch size would let torch
            # compile slower code for all sizes, and the training would use it.
            if self.compile_net == "inductor":
                round_as_eager()
            self.net.compile(
                backend=self.compile_net, mode=self.compile_mode, dynamic=False
            )
            self.is_compiled = True
            name = type(self.net).__name__
            say(f"{name} is compiled in the first steps, which may take minutes")

    def configure_callbacks(self) -> list[Callback]:
        """Add the callback Curves, unless the Trainer has it. Lightning calls this."""
        if self.curves_callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            return []
        return [self.curves_callback]

    def step_scheduler_every(self) -> Literal["epoch", "step"]:
        """Return how often the scheduler steps: `scheduler_interval`, or the default
        for its class."""
        if self.scheduler_interval:
            return self.scheduler_interval
        name = self.scheduler
        if not isinstance(name, str):
            name = type(name).__name__
        if name.rpartition(".")[2] in MADE_FOR_STEPS:
            return "step"
        return "epoch"

    def configure_optimizers(self) -> Any:
        """Return the optimizer and the scheduler in Lightning's form. Lightning calls
        this. A subclass that overrides it chooses both."""
        optimizer = self._make_optimizer()
        if self.scheduler is None:
            return optimizer
        interval = self.step_scheduler_every()
        scheduler = self.scheduler
        if isinstance(scheduler, str):
            num_steps = None
            if length_argument(scheduler, self.scheduler_args):
                num_steps = schedule_length(self.trainer, interval)
            scheduler = build_scheduler(
                scheduler, self.scheduler_args, optimizer, num_steps
            )
        config: dict[str, Any] = {"scheduler": scheduler, "interval": interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            watched: Any = "loss"
            if scheduler.mode == "max":
                watched = next(iter(collection(self.metrics)), watched)
            config["monitor"] = f"val/{watched}"
            # the metric is new only after an epoch with a validation
            config["interval"] = "epoch"
            config["frequency"] = self.trainer.check_val_every_n_epoch or 1
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _make_optimizer(self) -> Optimizer:
        """Return the optimizer, made from a name or a class, or the object that a
        subclass has assigned. Raise UserError if an object has parameter groups."""
        if isinstance(self.optimizer, Optimizer):
            if self.parameter_groups:
                raise UserError(
                    "model.parameter_groups: an optimizer object has its groups",
                    status=2,
                )
            return self.optimizer
        groups = grouped(self.named_parameters(), self.parameter_groups)
        if not isinstance(self.optimizer, str):  # a class
            return self.optimizer(groups, lr=self.lr, **self.optimizer_args)
        # With mixed precision a fused optimizer unscales the gradients itself, in its
        # step. Lightning cannot clip them before (its issue 21435).
        is_mixed = self.trainer.precision in MIXED
        fused = not (self.trainer.gradient_clip_val and is_mixed)
        args = self.optimizer_args
        return build_optimizer(self.optimizer, args, groups, self.lr, fused)


def num_samples(targets: Any, outputs: Any, batch: Any) -> int:
    """Return the number of samples: the length of the first tensor of targets, outputs
    and inputs. If none of them is a tensor, a tuple of tensors has a row for each
    sample, and another tuple or list has an entry. Without any of them it is 1."""
    parts = []
    for values in (targets, outputs, inputs_of(batch)):
        while isinstance(values, dict):
            values = next(iter(values.values()), None)
        if isinstance(values, Tensor) and values.dim():
            return len(values)
        parts.append(values)
    for values in parts:
        if isinstance(values, tuple) and isinstance(values[0], Tensor):
            return len(values[0])
        if isinstance(values, list | tuple):
            return len(values)
    return 1


def has_named_optimizer(model: LightningModule) -> TypeGuard[BaseModule]:
    """Return whether BaseModule builds the optimizer and the scheduler from their
    names. It does not if a subclass overrides `configure_optimizers`, or if it assigns
    an object or a class to `optimizer` or `scheduler`."""
    if not isinstance(model, BaseModule):
        return False
    if is_overridden("configure_optimizers", model, BaseModule):
        return False
    has_scheduler_name = isinstance(model.scheduler, str | None)
    return isinstance(model.optimizer, str) and has_scheduler_name
