"""The base class of a project's LightningModules: optimizer, schedule, curves."""

from collections.abc import Callable
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

from lightbase.curves import NEVER, Curves, Stage, is_log_step
from lightbase.errors import UserError, function_at
from lightbase.metrics import Metrics
from lightbase.optim import (
    build_optimizer,
    build_scheduler,
    check_options,
    grouped,
    interval_of,
    num_scheduler_steps,
)
from lightbase.transfer import WeightsFile, freeze_parameters, initialize, load_weights


class BaseModule(LightningModule):
    """Trains `net` with `criterion`, measured by `metrics`. A subclass may assign other values to
    `criterion`, `metrics`, `lr`, `optimizer` and `scheduler`; the last two may be objects, too.

    The steps call `track`, which makes these curves: train/ on log steps (means over the samples
    since the last log step), val/ after each validation, test/ and test/num_samples after a test.
    lr is logged with train/.

    Args:
        net: The network.
        criterion: The loss of outputs and targets in all stages, a mean over the samples of a
            batch. With another mean (class weights, an index that is ignored) or a sum, val/loss
            depends on the batch size.
        metrics: By name, such as {f1: {class_path: torchmetrics.classification.MulticlassF1Score}}.
        lr: Learning rate.
        optimizer: A class of torch.optim, such as SGD, Adam or AdamW, or the import path of another
            one.
        optimizer_args: Its other arguments, such as {momentum: 0.9}.
        parameter_groups: Other options for some parameters, such as {head: {lr: 0.1},
            norms_and_biases: {weight_decay: 0}}. A group is the first part of the parameters' names
            or a pattern ("*.bias"); norms_and_biases: all parameters of one dimension.
        scheduler: A class of torch.optim.lr_scheduler, such as CosineAnnealingLR; WarmupCosineLR
            (linear warm-up, then cosine) or FinalDecayLR (constant, then down to 0); or an import
            path. None keeps the learning rate.
        scheduler_args: Its arguments, such as {warmup_steps: 500}; the length of the training
            (T_max, total_steps) and the highest rate (max_lr, which is lr) are filled in.
            ReduceLROnPlateau watches val/loss, with {mode: max} the first of the metrics.
        scheduler_interval: Step the scheduler after every "epoch" or every "step". Unless given,
            OneCycleLR, CyclicLR, WarmupCosineLR and FinalDecayLR step every step, others every
            epoch.
        initializer: Import path of a function f(net, inputs), which is called before a new training
            with up to 1,000 training samples (N, ...), as the network gets them. It sets weights
            that depend on the data.
        test_views: Import path of a function from inputs (N, ...) to several such tensors. Test and
            prediction average their outputs. One is lightbase.data.transforms.mirrored.
        channels_last: Keep images and convolutions' weights as (N, H, W, C) in memory, which is
            mostly faster.
        compile_net: Compile the network with this backend of torch.compile, such as "inductor".
        compile_mode: Of torch.compile, such as "reduce-overhead", which launches CUDA graphs, or
            "max-autotune".
        weights: A checkpoint, state_dict or *.safetensors. A new training starts with the tensors
            that fit by name and shape.
        freeze: First parts of names or patterns, such as [conv1, "*.bias"]. Such parameters do not
            train. Modules that have no others stay in eval mode.
    """

    optimizer: str | Optimizer | Callable[..., Optimizer]
    scheduler: str | LRScheduler | None
    # What outputs and targets mean, for pictures, evaluate.py --report and predict.py.
    task: Literal["multiclass", "multilabel", "segmentation", "regression", "text"] | None = None
    tracked: tuple[Tensor, Tensor] | None = None  # outputs and targets of the newest batch

    def __init__(
        self,
        net: nn.Module,
        criterion: nn.Module,
        metrics: Metrics | Metric | None = None,
        lr: PositiveFloat = 0.01,
        optimizer: str = "SGD",
        optimizer_args: dict[str, Any] | None = None,
        parameter_groups: dict[str, dict[str, Any]] | None = None,
        scheduler: str | None = None,
        scheduler_args: dict[str, Any] | None = None,
        scheduler_interval: Literal["epoch", "step"] | None = None,
        initializer: str | None = None,
        test_views: str | None = None,
        channels_last: bool = True,
        compile_net: str | None = None,
        compile_mode: str | None = None,
        weights: WeightsFile | None = None,
        freeze: list[str | int] | str | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.criterion = criterion
        self.metrics = metrics or {}
        self.lr = float(lr)
        self.optimizer = optimizer
        self.optimizer_args = optimizer_args or {}
        self.parameter_groups = {str(name): args for name, args in (parameter_groups or {}).items()}
        self.scheduler = scheduler
        self.scheduler_args = scheduler_args or {}
        self.scheduler_interval = scheduler_interval
        self.initializer = function_at("initializer", initializer)
        self.test_views = function_at("test_views", test_views)
        self.channels_last = channels_last
        self.compile_net = compile_net
        self.compile_mode = compile_mode
        self.weights_file = weights
        frozen: Any = freeze.split(",") if isinstance(freeze, str) else freeze or []
        self.frozen_names = [str(name).strip() for name in frozen]
        self.frozen_modules: list[nn.Module] = []
        self.is_initialized = False
        self.is_frozen = False
        self.is_compiled = False
        self.curves_callback = Curves()  # in a run it stands before all other callbacks
        if compile_net is not None:
            backends = torch.compiler.list_backends(exclude_tags=())
            if compile_net not in backends:
                what = f"compile_net {compile_net!r} is no backend of torch.compile"
                raise ValueError(f"{what}; inductor is the usual one")
        if compile_mode is not None and compile_net is None:
            what = f"model.compile_mode {compile_mode} has no effect without a backend"
            way_out = "give --model.compile_net inductor, or --model.compile_mode null"
            raise UserError(f"{what}\n{way_out}", 2)
        if weights is not None and initializer is not None:
            what = "model.weights and model.initializer both set weights"
            raise UserError(f"{what}: --model.initializer null", 2)

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs (N, ...); outside training their mean over the test_views of x."""
        if self.training or self.test_views is None:
            return self.net(x)
        self.curves_callback.saw_views = True
        return mean_over_views(self.net, self.test_views, x)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.frozen_modules:
            module.eval()
        return self

    def track(
        self,
        stage: Stage,
        loss: Tensor,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
        **values: Any,
    ) -> None:
        """Add a batch to the curves of a stage.

        loss, values: means over the batch, for stage/loss and stage/NAME.
        outputs, targets: (N, ...), for the metrics; without them the stage has none.
        """
        if not self.curves_callback.means:  # called without a Trainer
            return
        samples = outputs if targets is None else targets
        means = {"loss": loss}
        for name, value in values.items():
            # new_full writes the number on the GPU; copying it there would wait for the GPU
            means[name] = value.to(loss) if isinstance(value, Tensor) else loss.new_full((), value)
        size = 1 if samples is None else len(samples)
        self.curves_callback.means[stage].add(size, means, outputs, targets)
        if outputs is not None and targets is not None:
            self.tracked = outputs.detach(), targets.detach()
        if stage == "train":
            self.curves_callback.lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            if self.trainer.world_size == 1 and is_log_step(self):
                self.curves_callback.log_train(self.trainer, self)

    def log(self, name: str, *args: Any, **options: Any) -> None:
        """As Lightning's. Curves refuses a name that `track` writes: both would be averaged."""
        self.curves_callback.logged.add(name)
        super().log(name, *args, **options)

    def prepare_weights(self) -> None:
        """Load and freeze weights. Called before each fit, and before a run makes its folder: a
        mistake ends the run early."""
        if self.weights_file is not None and not self.is_initialized:
            load_weights(self.net, self.weights_file)
            self.is_initialized = True  # a second fit continues with the weights of the first
        if self.frozen_names and not self.is_frozen:
            self.frozen_modules = freeze_parameters(self, self.frozen_names)
            self.is_frozen = True

    def prepare_net(self, trains: bool) -> None:
        """Prepare weights, memory layout and compilation. Curves calls it before each fit or test;
        a hook of the module would be lost if a subclass overrides it without super()."""
        if trains:
            self.prepare_weights()
        if trains and self.initializer is not None and not self.is_initialized:
            initialize(self.net, self.initializer, self.trainer.datamodule)  # type: ignore[attr-defined]
            self.is_initialized = True
        if self.channels_last:
            tensors: list[Tensor] = [*self.net.parameters()]
            if self.trainer.strategy.root_device.type != "cpu":  # there it changes the last digits
                tensors += self.net.buffers()
            for tensor in tensors:
                if not is_lazy(tensor) and tensor.dim() == 4:
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        if self.compile_net and not self.is_compiled:
            # torch.compile(net) would rename the weights. dynamic=False: after an evaluation with
            # another batch size the training would get slower code for all sizes.
            self.net.compile(backend=self.compile_net, mode=self.compile_mode, dynamic=False)
            self.is_compiled = True

    def configure_callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [] if self.curves_callback in callbacks else [self.curves_callback]

    def step_scheduler_every(self) -> Literal["epoch", "step"]:
        return self.scheduler_interval or interval_of(self.scheduler)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self._build_optimizer(), self.scheduler
        check_options(self.parameter_groups, optimizer)
        if scheduler is None:
            return optimizer
        if isinstance(scheduler, str):
            num_steps = num_scheduler_steps(self.trainer, self.step_scheduler_every())
            scheduler = build_scheduler(scheduler, self.scheduler_args, optimizer, num_steps)
        config: dict[str, Any] = {"scheduler": scheduler, "interval": self.step_scheduler_every()}
        if isinstance(scheduler, ReduceLROnPlateau):
            # Curves steps it after each validation: see NEVER
            config |= {"interval": "epoch", "frequency": NEVER, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _build_optimizer(self) -> Optimizer:
        if isinstance(self.optimizer, Optimizer):
            if self.parameter_groups:
                what = "model.parameter_groups: an optimizer that is an object has its groups"
                raise UserError(f"{what}; leave them out", 2)
            return self.optimizer
        parameters: Any = self.parameters()
        if self.parameter_groups:
            parameters = grouped(self.named_parameters(), self.parameter_groups)
        if not isinstance(self.optimizer, str):
            return self.optimizer(parameters, lr=self.lr, **self.optimizer_args)
        # Lightning cannot clip gradients that a fused optimizer unscales (its issue 21435)
        is_mixed = str(self.trainer.precision).endswith("-mixed")
        fused = not (self.trainer.gradient_clip_val and is_mixed)
        if self.optimizer_args.get("fused") and not fused:
            what = f"model.optimizer_args.fused true in {self.trainer.precision}"
            raise UserError(f"{what}: leave it or trainer.gradient_clip_val out", 2)
        return build_optimizer(self.optimizer, self.optimizer_args, parameters, self.lr, fused)


def mean_over_views(net: nn.Module, test_views: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The mean of the network's outputs (N, ...) over the views of x, (N, ...)."""
    views = test_views(x)
    if not isinstance(views, list | tuple) or not views or not all(map(torch.is_tensor, views)):
        what = f"it returns a {type(views).__name__}, where a list of tensors belongs"
        raise UserError(f"model.test_views: {what}, each with all samples", 2)
    # the clone: a compiled network may use the memory of its outputs again
    return torch.stack([net(view).clone() for view in views]).mean(0)


def has_named_optimizer(model: LightningModule) -> TypeGuard[BaseModule]:
    """Whether BaseModule builds the optimizer and the scheduler from their names. It does not if a
    subclass overrides `configure_optimizers`, or assigns an object or a function."""
    if not isinstance(model, BaseModule):
        return False
    if is_overridden("configure_optimizers", model, BaseModule):
        return False
    return isinstance(model.optimizer, str) and isinstance(model.scheduler, str | None)
