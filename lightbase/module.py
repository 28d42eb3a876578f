"""The LightningModule below classifier.py and regressor.py: optimiser, schedule, curves."""

from collections.abc import Callable
from typing import Any, Literal, Self, get_args

import torch
from jsonargparse.typing import PositiveFloat
from lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

from lightbase.compat import is_compiled
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
    """Trains `net` with `criterion`, measured by `metrics`. What a subclass assigns to `criterion`,
    `metrics`, `lr`, `optimizer` and `scheduler` is what trains; the last two may be objects, too.

    Logged, of what the steps give to `track`: train/ on log steps (means over the samples since the
    last one), val/ after each validation, test/ and test/num_samples after a test; and lr.

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
        parameter_groups: What other options some parameters have, such as {head: {lr: 0.1},
            norms_and_biases: {weight_decay: 0}}, by what their names begin with or match
                ("*.bias"); norms_and_biases: of one dimension.
        scheduler: A class of torch.optim.lr_scheduler, such as CosineAnnealingLR; WarmupCosineLR
            (linear warm-up, then cosine) or FinalDecayLR (constant, then down to 0); or an import
            path. None keeps the learning rate.
        scheduler_args: Its arguments, such as {warmup_steps: 500}; the length of the training
            (T_max, total_steps) and the highest rate (max_lr, which is lr) are filled in.
            ReduceLROnPlateau watches val/loss, with {mode: max} the first of the metrics.
        scheduler_interval: Step the scheduler after every "epoch" or every "step"; unless given
            after each step where it is made for that (OneCycleLR, CyclicLR and ours), after each
            epoch otherwise.
        initializer: Import path of a function of the network and up to 1,000 training samples (N,
            ...), as the network gets them, that is called before a new training: for weights that
            follow from the data.
        test_views: Import path of a function from inputs (N, ...) to several such tensors, whose
            outputs test and prediction average: lightbase.data.transforms.mirrored, for instance.
        channels_last: Keep images and convolutions' weights as (N, H, W, C) in memory, which is
            mostly faster.
        compile_net: Compile the network with this backend of torch.compile, "inductor" for
            instance.
        compile_mode: Of torch.compile, such as "reduce-overhead", which launches CUDA graphs, or
            "max-autotune".
        weights: A checkpoint, state_dict or *.safetensors: a new training starts with what fits by
            name and shape.
        freeze: What the names of parameters begin with or match, such as [conv1, "*.bias"]: those
            do not train, and modules without any other stay in eval mode.
    """

    optimizer: str | Optimizer | Callable[..., Optimizer]
    scheduler: str | LRScheduler | None

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
        self.parameter_groups = {
            str(name): options for name, options in (parameter_groups or {}).items()
        }
        self.scheduler = scheduler
        self.scheduler_args = scheduler_args or {}
        self.scheduler_interval = scheduler_interval
        self.initializer = function_at("initializer", initializer)
        self.test_views = function_at("test_views", test_views)
        self.channels_last = channels_last
        self.compile_net = compile_net
        self.compile_mode = compile_mode
        self.weights_file = weights
        self.frozen_names = [
            str(n).strip() for n in (freeze.split(",") if isinstance(freeze, str) else freeze or [])
        ]
        self.frozen_modules: list[nn.Module] = []
        self.is_initialized = False
        self.curves_callback = (
            Curves()
        )  # writes what `track` is told; the engine puts it before all others
        if compile_net is not None and compile_net not in torch.compiler.list_backends(
            exclude_tags=()
        ):
            raise ValueError(
                f"compile_net {compile_net!r} is no backend of torch.compile; inductor is the "
                "usual one"
            )
        if weights is not None and initializer is not None:
            raise UserError(
                "model.weights and model.initializer both set weights: --model.initializer null", 2
            )

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs (N, ...); outside training the mean over the test_views of x."""
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
        if stage not in self.curves_callback.means:
            if stage not in get_args(Stage):
                raise ValueError(f"track({stage!r}, ...): a stage is train, val or test")
            return  # called without a Trainer
        size = next((len(tensor) for tensor in (targets, outputs) if tensor is not None), 1)
        # filled in there: a copy of a number to the GPU waits for it
        own = {
            k: v.to(loss) if isinstance(v, Tensor) else loss.new_full((), v)
            for k, v in values.items()
        }
        self.curves_callback.means[stage].add(size, {"loss": loss, **own}, outputs, targets)
        if stage == "train":
            self.curves_callback.lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            if is_log_step(self):
                self.curves_callback.log_train(self.trainer, self)

    def prepare_weights(self) -> None:
        """Before each fit; by the engine before all else, too, so that a mistake is told at
        once."""
        left = set[str]()
        if self.weights_file is not None and not self.is_initialized:
            left = load_weights(self.net, self.weights_file)
            self.is_initialized = True  # a second fit goes on from the weights of the first
        self.frozen_modules = freeze_parameters(self, self.frozen_names, left)

    def prepare_net(self, trains: bool) -> None:
        """Before each fit or test, by Curves: not a hook that a subclass may override."""
        if trains:
            self.prepare_weights()
        if trains and self.initializer is not None and not self.is_initialized:
            initialize(self.net, self.initializer, self.trainer.datamodule)  # type: ignore[attr-defined]
            self.is_initialized = True
        if self.channels_last:
            for parameter in self.net.parameters():
                if not is_lazy(parameter) and parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if self.compile_net and not is_compiled(self.net):
            self.net.compile(
                backend=self.compile_net, mode=self.compile_mode
            )  # torch.compile would rename weights

    def configure_callbacks(self) -> list[Callback]:
        # for a plain Trainer; the engine's has it already, in front of the others
        return [] if self.curves_callback in self.trainer.callbacks else [self.curves_callback]  # type: ignore[attr-defined]

    def step_scheduler_every(self) -> Literal["epoch", "step"]:
        return self.scheduler_interval or interval_of(self.scheduler)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.optimizer, self.scheduler
        # without groups what everybody's optimiser takes, and a callable of the user's may filter
        own = self.parameter_groups
        parameters: Any = grouped(self.named_parameters(), own) if own else self.parameters()
        if isinstance(optimizer, str):
            # Lightning cannot clip gradients that a fused optimiser takes the scale off (its issue
            # 21435)
            clips = self.trainer.gradient_clip_val and str(self.trainer.precision).endswith(
                "-mixed"
            )
            optimizer = build_optimizer(
                optimizer, self.optimizer_args, parameters, self.lr, fused=not clips
            )
        elif not isinstance(optimizer, Optimizer):
            optimizer = optimizer(parameters, lr=self.lr, **self.optimizer_args)
        elif own:
            raise UserError(
                "model.parameter_groups: an optimiser that is an object has its own; leave it out",
                2,
            )
        check_options(own, optimizer)
        if scheduler is None:
            return optimizer
        if isinstance(scheduler, str):
            scheduler = build_scheduler(
                scheduler, self.scheduler_args, optimizer, self.num_scheduler_steps()
            )
        config: dict[str, Any] = {"scheduler": scheduler, "interval": self.step_scheduler_every()}
        if isinstance(scheduler, ReduceLROnPlateau):  # see Curves
            config |= {"interval": "epoch", "frequency": NEVER, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def num_scheduler_steps(self) -> int | None:
        """How often the scheduler steps in the whole training; None if the training has no end."""
        return num_scheduler_steps(self.trainer, self.step_scheduler_every())


def mean_over_views(net: nn.Module, test_views: str | Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The mean of the outputs (N, ...) for several tensors that are made of x, (N, ...)."""
    make_views: Any = function_at("test_views", test_views)
    views = make_views(x)
    are_tensors = isinstance(views, list | tuple) and all(
        isinstance(view, Tensor) for view in views
    )
    if not are_tensors or not views or any(view.shape[0] != x.shape[0] for view in views):
        kind = type(views).__name__ if not are_tensors or views else "list of nothing"
        what = f"{getattr(make_views, '__name__', make_views)} gives a {kind}"
        raise UserError(
            f"model.test_views: {what}, where a list of tensors belongs, each with all "
            f"{len(x)} samples",
            2,
        )
    return torch.stack([net(view) for view in views]).mean(0)
