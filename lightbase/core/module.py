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
from lightbase.core.curves import Curves, Stage
from lightbase.core.devices import MIXED
from lightbase.core.errors import UserError, say
from lightbase.core.metrics import Metrics, collection
from lightbase.core.optim import (
    MADE_FOR_STEPS,
    build_optimizer,
    build_scheduler,
    grouped,
    length_argument,
    schedule_length,
)
from lightbase.core.transfer import WeightsFile, freeze_parameters, load_weights


class BaseModule(LightningModule):
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
        groups = parameter_groups or {}
        self.parameter_groups = {str(name): groups[name] for name in groups}
        self.scheduler = scheduler
        self.scheduler_args = scheduler_args or {}
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
        self.is_frozen = False
        self.is_compiled = False
        self.curves_callback = Curves()  # in a run it stands before all other callbacks
        if compile_net is not None:
            check_backend(compile_net)
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
        """Return the module with the weights of a checkpoint. Nothing that the file
        names is built unless the file is yours, see `lightbase.load`.

        map_location: The device of the module, the CPU by default.
        strict: False keeps the module's tensors that are not in the file.
        hparams_file, weights_only: Arguments of Lightning's method. They must be None
            or True: no file is read otherwise.
        arguments: The arguments of the constructor. With them the module is built from
            them alone, and any file gives the weights. Without them it is built from
            the config in the file.
        """
        from lightbase import load  # it imports this module

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
        if map_location is not None:
            module.to(map_location)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs (N, ...)."""
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
        """Add a batch to the curves of a stage. `Curves` writes their points.

        loss, values: Means over the batch, for stage/loss and stage/NAME.
        outputs, targets: (N, ...), for the metrics; without them the stage has none,
            and the samples of the batch are counted. They may be what else the metrics
            take, such as lists with an entry for each sample.
        """
        outputs = apply_to_collection(outputs, Tensor, Tensor.detach)
        self.tracked = outputs, targets
        curves = self.curves_callback
        if not curves.means:  # called without a Trainer
            return
        means = {"loss": loss}
        for name, value in values.items():
            if isinstance(value, Tensor):
                means[name] = value.to(loss)
            else:  # written on the GPU: copying it there would wait for the GPU
                means[name] = loss.new_full((), value)
        samples = outputs if targets is None else targets
        if samples is None:
            samples = inputs_of(newest_batch(self.trainer))
        curves.means[stage].add(num_samples(samples), means, outputs, targets)
        if stage == "train":
            curves.note_rates(self.trainer)

    def log(self, name: str, *args: Any, **options: Any) -> None:
        """Log as Lightning does. Curves refuses a name that `track` writes: both would
        be averaged."""
        self.curves_callback.logged.add(name)
        super().log(name, *args, **options)

    def prepare_weights(self) -> None:
        """Load and freeze weights. It is called before each fit, and before a run makes
        its folder: a mistake ends the run early."""
        if self.weights_file is not None and not self.has_weights:
            load_weights(self.net, self.weights_file)
            # a second fit continues with the weights of the first
            self.has_weights = True
        if self.frozen_names and not self.is_frozen:
            self.frozen_modules = freeze_parameters(self, self.frozen_names)
            self.is_frozen = True

    def prepare_net(self, trains: bool) -> None:
        """Prepare weights, memory layout and compilation.

        Curves calls it before each fit or test; a hook of the module would be lost if a
        subclass overrides it without super().
        """
        if trains:
            self.prepare_weights()
        if self.channels_last:
            tensors: list[Tensor] = [*self.net.parameters()]
            # on a CPU the layout of buffers changes the last digits
            if self.trainer.strategy.root_device.type != "cpu":
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
            name = type(self.net).__name__
            say(f"{name} is compiled in the first steps, which may take minutes")

    def configure_callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if self.curves_callback in callbacks:
            return []
        return [self.curves_callback]

    def step_scheduler_every(self) -> Literal["epoch", "step"]:
        """Return how often the scheduler steps."""
        if self.scheduler_interval:
            return self.scheduler_interval
        name = self.scheduler
        if not isinstance(name, str):
            name = type(name).__name__
        if name.rpartition(".")[2] in MADE_FOR_STEPS:
            return "step"
        return "epoch"

    def configure_optimizers(self) -> Any:
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
            names = ["loss"]
            if scheduler.mode == "max":
                names = [*map(str, collection(self.metrics)), "loss"]
            config["monitor"] = f"val/{names[0]}"
            # after epochs with a validation
            config["interval"] = "epoch"
            config["frequency"] = self.trainer.check_val_every_n_epoch or 1
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _make_optimizer(self) -> Optimizer:
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
        # Lightning cannot clip gradients that a fused optimizer unscales (its issue
        # 21435)
        is_mixed = self.trainer.precision in MIXED
        fused = not (self.trainer.gradient_clip_val and is_mixed)
        return build_optimizer(
            self.optimizer, self.optimizer_args, groups, self.lr, fused
        )


def check_backend(name: str) -> None:
    """Raise ValueError if torch.compile has no backend of this name."""
    if name not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(f"compile_net {name!r} is no backend such as inductor")


def num_samples(values: Any) -> int:
    """Return the number of samples in `values`: the length of a tensor or list, or of a
    dict's first value. None counts as one."""
    while isinstance(values, dict):
        values = next(iter(values.values()))
    return 1 if values is None else len(values)


def has_named_optimizer(model: LightningModule) -> TypeGuard[BaseModule]:
    """Return whether BaseModule builds the optimizer and the scheduler from their
    names. It does not if a subclass overrides `configure_optimizers`, or assigns an
    object or a class."""
    if not isinstance(model, BaseModule):
        return False
    if is_overridden("configure_optimizers", model, BaseModule):
        return False
    has_scheduler_name = isinstance(model.scheduler, str | None)
    return isinstance(model.optimizer, str) and has_scheduler_name
