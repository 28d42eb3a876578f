"""The checks before a run has a folder, and the metric that compares epochs.

`dry_run` loads the data, and tries the network and the optimizer. `choose_monitor`
chooses the metric. All other functions are called by these two.
"""

import ast
import contextlib
import inspect
import os
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightbase.core.batches import for_network, inputs_of, targets_of, tensors_in
from lightbase.core.data import BaseDataModule
from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import MIXED, forks_processes, num_gpus, parse_devices
from lightbase.core.errors import UserError, first_line, raised_at, say
from lightbase.core.metrics import collection
from lightbase.core.module import BaseModule, has_named_optimizer
from lightbase.core.names import better_by_name
from lightbase.core.optim import try_schedule
from lightbase.core.splits import sparse_classes

WAY_OUT = (
    "change the arguments, such as --model.net.num_classes, or use --try_network false"
)
"""What to do about a network that does not go with the data."""


@short_device_errors()
def dry_run(model: LightningModule, data: LightningDataModule, config: Any) -> None:
    """Load weights and data, and try network and optimizer.

    A mistake is found here, before the run has a folder. Of a plain LightningModule
    only `training_step` is checked; a plain LightningDataModule is not checked.

    config: The settings of the run.

    Raise UserError with the way out.
    """
    if model.automatic_optimization and returns_nothing(model.training_step):
        raise UserError(
            f"training_step of {type(model).__name__} returns nothing, so nothing would"
            " train",
            "end it with `return loss`, the loss of the batch",
            2,
        )
    if not model.automatic_optimization:
        check_manual(config.trainer)
    if config.trainer.limit_train_batches == 0:
        say("trainer.limit_train_batches 0: nothing is trained")
    if isinstance(model, BaseModule):
        check_options(model, config.trainer)
        model.prepare_weights()
    if type(data).train_dataloader is not BaseDataModule.train_dataloader:
        say(
            f"{type(data).__name__} has its own DataLoaders: a resume may end with "
            "other weights; several processes may count samples twice, and each trains "
            "on all of an IterableDataset"
        )
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=has_test(model, data))
        if config.try_network:
            try_network(model, data, config.trainer)
    # A step of torch's Adam starts CUDA even on the CPU, and a process that forks must
    # not start it.
    if has_named_optimizer(model) and not forks_processes(config.trainer):
        try_schedule(model)


def check_manual(trainer: Any) -> None:
    """Raise UserError for options that Lightning refuses beside manual optimization,
    but only in the training.

    trainer: The Trainer's flags.
    """
    for name, default in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
        if trainer[name] not in (default, 0):
            raise UserError(
                f"trainer.{name} {trainer[name]}: the module steps its optimizer itself"
                " (manual optimization)",
                "do it in training_step, and leave the flag out",
                2,
            )


def returns_nothing(method: Any) -> bool:
    """Return whether the source of a method has no `return` with a value. Return False
    if there is no source, or if a decorator may change the result.

    The mistake is a training_step that computes the loss and does not return it. If its
    source has a `return` and it returns None all the same, Lightning warns of it.
    """
    try:
        source = textwrap.dedent(inspect.getsource(method))
        (function,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return False
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            return False
    return True


def check_options(model: BaseModule, trainer: Any) -> None:
    """Raise UserError for options that torch or Lightning refuse together, but only in
    the first step. Lightning's issue 21435 is about fused optimizers.

    trainer: The Trainer's flags.
    """
    precision = trainer.precision
    every = trainer.accumulate_grad_batches
    is_fused = model.optimizer_args.get("fused")
    if is_fused and trainer.gradient_clip_val and str(precision) in MIXED:
        raise UserError(
            "model.optimizer_args.fused true: a fused optimizer does not go with "
            f"gradient_clip_val and precision {precision}",
            "leave it out",
            2,
        )
    if model.compile_mode == "reduce-overhead" and every != 1:
        raise UserError(
            "model.compile_mode reduce-overhead: CUDA graphs do not go with "
            f"accumulate_grad_batches {every}",
            "leave one of them out",
            2,
        )


def has_test(model: LightningModule, data: LightningDataModule) -> bool:
    """Return whether the model has a test_step and the data a test_dataloader."""
    return is_overridden("test_step", model) and is_overridden("test_dataloader", data)


def load_data(data: BaseDataModule, with_test: bool) -> None:
    """Load the samples for training and validation, and print how many there are.

    with_test: Load the test samples, too.

    Raise UserError for data that cannot be loaded, or whose transforms would change
    only a part of a batch.
    """
    data.prepare_data()
    data.setup("fit")
    check_transforms(data)
    if with_test:
        data.setup("test")
    sizes = {split: f"{len(samples):,}" for split, samples in data.splits.items()}
    text = (
        f"Data: {type(data).__name__}, {sizes['train']} training and "
        f"{sizes.get('val', 0)} validation samples"
    )
    if data.num_classes:
        text += f" of {data.num_classes} classes"
    text += f", batch size {data.batch_size}"
    if data.fold:
        text += f"; fold {data.fold.number} of {data.fold.num_folds} is the test set"
    say(text)
    sparse = sparse_classes(data.splits, data.classes)
    if sparse:
        say(f"Classes: {sparse}")


def check_transforms(data: BaseDataModule) -> None:
    """Raise UserError if `normalize` or `augment` would leave a part of the batch
    unchanged that has to change with the inputs: further images, masks, target images.

    The two hooks get the inputs only. `transform_batch` and `on_after_batch_transfer`
    get all parts, so data that overrides one of them is not checked. A third part has
    to change, because nobody knows what it is. A target has to change if it has the
    shape and dtype of the inputs, or if images are augmented that have its height and
    width.
    """
    batch = data.splits["train"].__getitems__([0])
    inputs = inputs_of(batch)
    if inputs is batch or not isinstance(inputs, Tensor):
        return
    if overrides(data, "transform_batch", "on_after_batch_transfer"):
        return
    if not overrides(data, "normalize", "augment"):
        return
    problem = ""
    if len(batch) > 2:
        problem = f"a batch of {type(data).__name__} has {len(batch)} parts"
    for target in tensors_in(batch[1:]):
        is_alike = target.shape == inputs.shape and target.dtype == inputs.dtype
        is_mask = target.dim() > 2 and target.shape[-2:] == inputs.shape[-2:]
        is_augmented = inputs.dim() > 2 and overrides(data, "augment")
        # a single number is no vector: numbers are predicted from numbers
        if (is_alike and inputs[0].numel() > 1) or (is_mask and is_augmented):
            problem = (
                f"{type(data).__name__} has targets {tuple(target.shape[1:])} for "
                f"inputs {tuple(inputs.shape[1:])}"
            )
    if problem:
        raise UserError(
            f"{problem}, and normalize and augment get the first part only",
            "override transform_batch(batch, training), which gets all",
            2,
        )


def overrides(data: BaseDataModule, *hooks: str) -> bool:
    """Return whether a data module overrides at least one of these hooks of
    BaseDataModule."""
    return any(is_overridden(hook, data, BaseDataModule) for hook in hooks)


def trial_device(trainer: Any) -> torch.device:
    """Return the device that the network will train on.

    trainer: The Trainer's flags.
    """
    if trainer.accelerator == "cpu" or not num_gpus():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        return torch.device("mps")
    devices = parse_devices(trainer.devices)
    index = 0
    if isinstance(devices, list):
        index = devices[0]
    return torch.device("cuda", index)


@short_device_errors()
@torch.no_grad()
def try_network(
    model: LightningModule, data: BaseDataModule, trainer: Any, split: str = "train"
) -> None:
    """Try `model.net` on two samples of a split, and print its number of parameters.

    It runs in eval mode, on the device and in the precision of the Trainer's flags.
    Only pairs whose inputs are one tensor are tried.

    Raise UserError if the network cannot take the samples, or has fewer outputs than
    there are classes. An error in the user's code is raised as it is.
    """
    samples = data.splits[split]
    batch = samples.__getitems__([*range(len(samples))[:2]])
    # a process that is forked cannot use CUDA if this one has started it
    if not isinstance(model, BaseModule) or forks_processes(trainer):
        return
    device = trial_device(trainer)
    if trainer.deterministic:
        # cuBLAS reads it at its first use, which is here; Lightning sets it later.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    batch = data.transform_batch(move_data_to_device(batch, device), training=False)
    inputs = inputs_of(batch)
    if targets_of(batch) is None:
        say(
            "Network: not tried, and its parameters not counted: batches are not "
            "pairs (inputs, targets); predict.py writes no column `true`"
        )
        return
    if not isinstance(inputs, Tensor):
        return
    net = model.net.to(device)
    name = type(net).__name__
    try:
        outputs = run_network(net, inputs, str(trainer.precision))
    except (RuntimeError, ValueError, AssertionError) as error:
        file, _ = raised_at(error)
        is_of_package = file.is_relative_to(Path(torch.__file__).parents[1])
        of_device = (torch.OutOfMemoryError, torch.AcceleratorError)
        if isinstance(error, of_device) or not is_of_package:
            raise  # it may be a bug of the user's
        raise UserError(
            f"{name} cannot take the samples {tuple(inputs.shape[1:])} of "
            f"{type(data).__name__}: {first_line(error)}",
            WAY_OUT,
        ) from error
    # Lightning, and the processes that it starts, expect the network there.
    net.to("cpu")
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    text = f"Network: {name}, {num_parameters:,} parameters"
    num_classes = data.num_classes or 0
    num_trained = getattr(model, "num_classes", 0) or 0
    most_classes = max(num_classes, num_trained)
    if most_classes and isinstance(outputs, Tensor) and outputs.dim() == 2:
        num_outputs = outputs.shape[1]
        if num_outputs < most_classes:
            raise UserError(
                f"{name} has {num_outputs} outputs for the {num_classes} classes of "
                f"{type(data).__name__} and model.num_classes {num_trained}",
                WAY_OUT,
            )
        if num_outputs > most_classes:
            text += f", {num_outputs} outputs for {most_classes} classes"
    say(text)


@contextlib.contextmanager
def short_loss_errors(model: LightningModule) -> Iterator[None]:
    """Within this context, turn an error in a loss of torch into a UserError: the loss
    does not go with the outputs of the network and the targets of the data.

    An error in a loss of the user's may be a bug, and is raised as it is.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        criterion = getattr(model, "criterion", None)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_in_loss = any(frame.f_locals.get("self") is criterion for frame in frames)
        is_of_torch = type(criterion).__module__.startswith("torch.")
        if (
            not is_in_loss
            or not is_of_torch
            or isinstance(error, torch.OutOfMemoryError)
        ):
            raise
        raise UserError(
            f"the loss {type(criterion).__name__} cannot take these outputs and "
            f"targets: {first_line(error)}",
            "give another --model.criterion, or change the step that calls it",
            2,
        ) from error


def run_network(net: nn.Module, inputs: Tensor, precision: str) -> Any:
    """Return the outputs of the network in eval mode. Afterwards each module is in the
    same mode as before, so that frozen modules stay in eval mode.

    inputs: (N, ...), on the device of the network.
    precision: The Trainer's flag as text.
    """
    training_modules = [module for module in net.modules() if module.training]
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    with (
        torch.autocast(inputs.device.type, dtype, enabled=precision in MIXED),
        isolate_rng(include_cuda=inputs.is_cuda),  # a lazy layer draws its weights
        # where kernels of Triton are launched
        torch.accelerator.device_index(inputs.device.index),
    ):
        outputs = net.eval()(for_network(inputs, net))
    for module in training_modules:  # frozen modules stay in eval mode
        module.training = True
    return outputs


class Monitor(NamedTuple):
    """The metric that compares epochs.

    name: The name of its curve, such as val/acc.
    mode: "min" if a lower value is better, "max" if a higher one is.
    """

    name: str
    mode: str


def choose_monitor(
    config: Any, model: LightningModule, data: LightningDataModule
) -> Monitor | None:
    """Return the metric for best.ckpt and early stopping, and print it. It is
    --monitor, or by default the first metric of the model, or its loss if it has none.

    config: The settings of the run.

    Return None if best.ckpt is the last epoch. The test set never selects an epoch.

    Raise UserError if --patience or ReduceLROnPlateau needs a metric and there is none,
    or if nobody knows whether a lower value is better.
    """
    reason = why_unvalidated(config.trainer, model, data)
    if reason and has_named_optimizer(model) and model.scheduler == "ReduceLROnPlateau":
        raise UserError(
            "--model.scheduler ReduceLROnPlateau needs a validation to go by: "
            f"{reason}",
            status=2,
        )
    name = config.monitor
    if name == "auto":
        name = None  # nobody knows what other modules log
        if isinstance(model, BaseModule):
            name = f"val/{[*collection(model.metrics), 'loss'][0]}"
    if name is None and not reason:
        reason = "no --monitor"
    if reason:
        if config.patience is not None:
            raise UserError(
                f"--patience {config.patience} needs a metric of a validation to go by:"
                f" {reason}",
                status=2,
            )
        say(f"best.ckpt is the last epoch ({reason})")
        return None
    mode = config.monitor_mode or better(name, model)
    order = "lowest" if mode == "min" else "highest"
    say(f"Best epoch: the one with the {order} {name}")
    return Monitor(name, mode)


def why_unvalidated(
    trainer: Any, model: LightningModule, data: LightningDataModule
) -> str | None:
    """Return why no validation can select an epoch, as text for a message. Return None
    if one can.

    trainer: The Trainer's flags.
    """
    if isinstance(data, BaseDataModule) and not (
        data.val_fraction or "val" in data.own_splits
    ):
        return "data.val_fraction 0: val/ is measured on the test set"
    if trainer.limit_val_batches == 0:
        return "trainer.limit_val_batches 0"
    every, last = trainer.check_val_every_n_epoch, trainer.max_epochs
    if every and last and 0 < last < every:
        return f"trainer.check_val_every_n_epoch {every} is above max_epochs {last}"
    if not is_overridden("validation_step", model):
        return f"{type(model).__name__} has no validation_step"
    if not is_overridden("val_dataloader", data):
        return f"{type(data).__name__} has no val_dataloader"
    return None


def better(monitor: str, model: LightningModule) -> str:
    """Return "min" if a lower value of a metric is better, else "max".

    torchmetrics tells it for the metrics of the model. For other values, the name is
    looked up.

    monitor: The name of the curve, such as val/acc.

    Raise UserError if the direction is unknown.
    """
    # not rpartition: a metric's name may contain "/"
    name = monitor.removeprefix("val/").partition("/dataloader_idx_")[0]
    if isinstance(model, BaseModule):
        metrics = collection(model.metrics)
        if name in metrics and metrics[name].higher_is_better is not None:
            return "max" if metrics[name].higher_is_better else "min"
    mode = better_by_name(name)
    if mode is None:
        problem = (
            f"--monitor {monitor}: is a higher or a lower value better? give "
            "--monitor_mode max or min"
        )
        if isinstance(model, BaseModule):  # nobody knows what other modules log
            problem += ", or --monitor val/loss"
        raise UserError(problem, status=2)
    return mode
