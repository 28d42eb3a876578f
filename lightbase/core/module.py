"""The base class of a project's LightningModules: optimizer, schedule, curves."""

from collections.abc import Callable
from typing import Any, Literal, Self, TypeGuard

import torch
from jsonargparse.typing import PositiveFloat
from lightning import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

from lightbase.core.batches import inputs_of
from lightbase.core.compat import newest_batch
from lightbase.core.curves import Curves, Stage, is_log_step
from lightbase.core.errors import UserError, say
from lightbase.core.metrics import Metrics, collection
from lightbase.core.objects import RecordsArguments
from lightbase.core.optim import (
    MADE_FOR_STEPS,
    build_optimizer,
    build_scheduler,
    grouped,
    num_scheduler_steps,
    open_lengths,
)
from lightbase.core.transfer import WeightsFile, freeze_parameters, load_weights


class BaseModule(RecordsArguments, LightningModule):
    """Trains `net` with `criterion`, measured by `metrics`. A subclass may assign other
    values to `criterion`, `metrics`, `lr`, `optimizer` and `scheduler`; the last two
    may be objects, too.

    The steps call `track`, which makes these curves: train/ on log steps (means over
    the samples since the last log step), val/ after each validation, test/ and
    test/num_samples after a test. lr is logged with train/.

    Args:
        net: The network.
        criterion: The loss of outputs and targets in all stages, a mean over the
            samples of a batch; not needed if the steps do not use it. With another mean
            (class weights, an index that is ignored) or a sum, val/loss depends on the
            batch size.
        metrics: By name, such as {f1: {class_path:
            torchmetrics.classification.MulticlassF1Score}}.
        lr: Learning rate.
        optimizer: A class of torch.optim, such as SGD, Adam or AdamW, or the import
            path of another one.
        optimizer_args: Its other arguments, such as {momentum: 0.9}.
        parameter_groups: Other options for some parameters, such as {head: {lr: 0.1},
            norms_and_biases: {weight_decay: 0}}. A group is the first part of the
            parameters' names or a pattern ("*.bias"); norms_and_biases: all parameters
            of one dimension.
        scheduler: A class of torch.optim.lr_scheduler, such as CosineAnnealingLR;
            WarmupCosineLR (linear warm-up, then cosine) or FinalDecayLR (constant, then
            down to 0); or an import path. None keeps the learning rate.
        scheduler_args: Its arguments, such as {warmup_steps: 500}; the length of the
            training (T_max, total_steps) and the highest rate (max_lr, which is lr) are
            filled in. ReduceLROnPlateau watches val/loss, with {mode: max} the first of
            the metrics.
        scheduler_interval: Step the scheduler after every "epoch" or every "step".
            Unless given, OneCycleLR, CyclicLR, WarmupCosineLR and FinalDecayLR step
            every step, others every epoch.
        channels_last: Keep images and convolutions' weights as (N, H, W, C) in memory,
            which is mostly faster.
        compile_net: Compile the network with this backend of torch.compile, such as
            "inductor".
        compile_mode: Of torch.compile, such as "reduce-overhead", which launches CUDA
            graphs, or "max-autotune".
        weights: A checkpoint, state_dict or *.safetensors. A new training starts with
            the tensors that fit by name and shape.
        freeze: First parts of names or patterns, such as [conv1, "*.bias"]. Such
            parameters do not train. Modules that have no others stay in eval mode.
    """

    task: (
        Literal["multiclass", "multilabel", "segmentation", "regression", "text"] | None
    ) = None
    """What outputs and targets mean, for pictures, evaluate.py --report and
    predict.py."""
    optimizer: str | Optimizer | Callable[..., Optimizer]
    scheduler: str | LRScheduler | None
    # outputs and targets of the newest batch, as `track` got them
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
        weights: WeightsFile | None = None,
        freeze: list[str | int] | str | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.criterion = criterion or nn.Identity()
        self.metrics = metrics or {}
        self.lr = float(lr)
        self.optimizer = optimizer
        self.optimizer_args = optimizer_args or {}
        self.parameter_groups = {
            str(name): args for name, args in (parameter_groups or {}).items()
        }
        self.scheduler = scheduler
        self.scheduler_args = scheduler_args or {}
        self.scheduler_interval = scheduler_interval
        self.channels_last = channels_last
        self.compile_net = compile_net
        self.compile_mode = compile_mode
        self.weights_file = weights
        frozen: Any = freeze.split(",") if isinstance(freeze, str) else freeze or []
        self.frozen_names = [str(name).strip() for name in frozen]
        self.frozen_modules: list[nn.Module] = []
        self.has_weights = False
        self.is_frozen = False
        self.is_compiled = False
        self.curves_callback = Curves()  # in a run it stands before all other callbacks
        if compile_net and compile_net not in torch.compiler.list_backends(
            exclude_tags=()
        ):
            raise ValueError(
                f"compile_net {compile_net!r} is no backend such as inductor"
            )
        if compile_mode is not None and compile_net is None:
            raise UserError(
                f"compile_mode {compile_mode} needs --model.compile_net inductor",
                status=2,
            )

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        trust: bool = False,
        **arguments: Any,
    ) -> Self:
        """The module with the weights of a checkpoint. Nothing that the file names is
        built unless the file is yours, see `lightbase.load`.

        map_location: The device of the module, the CPU unless given.
        strict: False: tensors of the module that are not in the file stay as they are.
        hparams_file, weights_only: Of Lightning's method; None or True, no file is read
            otherwise.
        arguments: Those of the constructor. With them the module is built from them
            alone, and any file gives the weights. Without them it is built from the
            config in the file.
        """
        from lightbase.commands.python import load  # it imports this module

        if hparams_file is not None or weights_only is False:
            raise UserError(
                "load_from_checkpoint reads weights only: give the arguments by name"
            )
        if arguments:
            module = cls(**arguments)
            load_weights(module, str(checkpoint_path), is_complete=strict is not False)
        else:
            loaded, _ = load(checkpoint_path, trust=trust)
            if not isinstance(loaded, cls):
                raise UserError(f"{checkpoint_path} is of a {type(loaded).__name__}")
            module = loaded
        return module if map_location is None else module.to(map_location)

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs (N, ...)."""
        return self.net(x)

    def train(self, mode: bool = True) -> Self:
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
        """Add a batch to the curves of a stage.

        loss, values: means over the batch, for stage/loss and stage/NAME.
        outputs, targets: (N, ...), for the metrics; without them the stage has none,
            and the samples of the batch are counted. They may be what else the metrics
            take, such as lists with an entry for each sample.
        """
        outputs = apply_to_collection(outputs, Tensor, Tensor.detach)
        self.tracked = outputs, targets
        if not self.curves_callback.means:  # called without a Trainer
            return
        means = {"loss": loss}
        for name, value in values.items():
            # new_full writes the number on the GPU; copying it there would wait for the
            # GPU
            means[name] = (
                value.to(loss)
                if isinstance(value, Tensor)
                else loss.new_full((), value)
            )
        values_of_samples = outputs if targets is None else targets
        if values_of_samples is None:
            values_of_samples = inputs_of(newest_batch(self.trainer))
        size = num_samples(values_of_samples)
        self.curves_callback.means[stage].add(size, means, outputs, targets)
        if stage == "train":
            self.curves_callback.note_rates(self.trainer)
            if self.trainer.world_size == 1 and is_log_step(self):
                self.curves_callback.log_train(self.trainer, self)

    def log(self, name: str, *args: Any, **options: Any) -> None:
        """As Lightning's. Curves refuses a name that `track` writes: both would be
        averaged."""
        self.curves_callback.logged.add(name)
        super().log(name, *args, **options)

    def prepare_weights(self) -> None:
        """Load and freeze weights. Called before each fit, and before a run makes its
        folder: a mistake ends the run early."""
        if self.weights_file is not None and not self.has_weights:
            load_weights(self.net, self.weights_file)
            self.has_weights = (
                True  # a second fit continues with the weights of the first
            )
        if self.frozen_names and not self.is_frozen:
            self.frozen_modules = freeze_parameters(self, self.frozen_names)
            self.is_frozen = True

    def prepare_net(self, trains: bool) -> None:
        """Prepare weights, memory layout and compilation. Curves calls it before each
        fit or test; a hook of the module would be lost if a subclass overrides it
        without super()."""
        if trains:
            self.prepare_weights()
        if self.channels_last:
            tensors: list[Tensor] = [*self.net.parameters()]
            if (
                self.trainer.strategy.root_device.type != "cpu"
            ):  # there it changes the last digits
                tensors += self.net.buffers()
            for tensor in tensors:
                if not is_lazy(tensor) and tensor.dim() == 4:
                    tensor.data = tensor.data.contiguous(
                        memory_format=torch.channels_last
                    )
        if self.compile_net and not self.is_compiled:
            # torch.compile(net) would rename the weights. dynamic=False: after an
            # evaluation with another batch size the training would get slower code for
            # all sizes.
            self.net.compile(
                backend=self.compile_net, mode=self.compile_mode, dynamic=False
            )
            self.is_compiled = True
            say(
                f"{type(self.net).__name__} is compiled in the first steps, which may take minutes"
            )

    def configure_callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [] if self.curves_callback in callbacks else [self.curves_callback]

    def step_scheduler_every(self) -> Literal["epoch", "step"]:
        name = (
            self.scheduler
            if isinstance(self.scheduler, str)
            else type(self.scheduler).__name__
        )
        is_by_step = name.rpartition(".")[2] in MADE_FOR_STEPS
        return self.scheduler_interval or ("step" if is_by_step else "epoch")

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.optimizer, self.scheduler
        groups = grouped(self.named_parameters(), self.parameter_groups)
        if isinstance(optimizer, Optimizer) and self.parameter_groups:
            raise UserError(
                "model.parameter_groups: an optimizer object has its groups", status=2
            )
        # Lightning cannot clip gradients that a fused optimizer unscales (its issue
        # 21435)
        is_mixed = str(self.trainer.precision).endswith("-mixed")
        fused = not (self.trainer.gradient_clip_val and is_mixed)
        if isinstance(optimizer, str):
            optimizer = build_optimizer(
                optimizer, self.optimizer_args, groups, self.lr, fused
            )
        elif not isinstance(optimizer, Optimizer):  # a class
            optimizer = optimizer(groups, lr=self.lr, **self.optimizer_args)
        if scheduler is None:
            return optimizer
        if isinstance(scheduler, str):
            num_steps = None
            if open_lengths(scheduler, self.scheduler_args):
                num_steps = num_scheduler_steps(
                    self.trainer, self.step_scheduler_every()
                )
            scheduler = build_scheduler(
                scheduler, self.scheduler_args, optimizer, num_steps
            )
        config: dict[str, Any] = {
            "scheduler": scheduler,
            "interval": self.step_scheduler_every(),
        }
        if isinstance(scheduler, ReduceLROnPlateau):
            names = [*map(str, collection(self.metrics)), "loss"]
            monitor = f"val/{names[0]}" if scheduler.mode == "max" else "val/loss"
            frequency = (
                self.trainer.check_val_every_n_epoch or 1
            )  # after epochs with a validation
            config |= {"interval": "epoch", "frequency": frequency, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": config}


def num_samples(values: Any) -> int:
    """The length of a tensor, of a list, or of the first value of a dict; 1 of None."""
    while isinstance(values, dict):
        values = next(iter(values.values()))
    return 1 if values is None else len(values)


def has_named_optimizer(model: LightningModule) -> TypeGuard[BaseModule]:
    """Whether BaseModule builds the optimizer and the scheduler from their names. It
    does not if a subclass overrides `configure_optimizers`, or assigns an object or a
    class."""
    if not isinstance(model, BaseModule):
        return False
    is_named = isinstance(model.optimizer, str) and isinstance(
        model.scheduler, str | None
    )
    return is_named and not is_overridden("configure_optimizers", model, BaseModule)
