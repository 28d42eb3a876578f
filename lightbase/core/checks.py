"""Checks before a run starts: of the data, of the network on two samples, of the
optimizer, and of the metric that compares epochs."""

import ast
import inspect
import os
import textwrap
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightbase.core.batches import for_network, inputs_of, targets_of, tensors_in
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import (
    forks_processes,
    num_gpus,
    parse_devices,
    short_device_errors,
)
from lightbase.core.errors import UserError, first_line, raised_at, say
from lightbase.core.folder import better_by_name
from lightbase.core.metrics import check_names, collection
from lightbase.core.module import BaseModule, has_named_optimizer
from lightbase.core.optim import try_schedule

MIXED = ("16", "bf16", "16-mixed", "bf16-mixed")  # precisions of the Trainer


@short_device_errors()
def prepare(model: LightningModule, data: LightningDataModule, config: Any) -> None:
    """Load weights and data, and try network and optimizer. A mistake is found here,
    before the run has a folder. A plain LightningModule or LightningDataModule is not
    checked."""
    if model.automatic_optimization and returns_nothing(model, "training_step"):
        what = f"training_step of {type(model).__name__} returns nothing, so nothing would train"
        raise UserError(what, "end it with `return loss`, the loss of the batch", 2)
    if isinstance(model, BaseModule):
        check_names(["loss", *map(str, collection(model.metrics)), "num_samples"])
        check_options(model, config.trainer)
        model.prepare_weights()
    if type(data).train_dataloader is not BaseDataModule.train_dataloader:
        limits = "a resume may end with other weights; several processes may count samples twice, "
        limits += "and each trains on all of an IterableDataset"
        say(f"{type(data).__name__} has its own DataLoaders: {limits}")
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=has_test(model, data))
        if config.try_network:
            try_network(model, data, config.trainer)
    # a step of torch's Adam starts CUDA even on the CPU, and a process that forks must
    # not start it
    device = trial_device(config.trainer)
    if device is not None:
        torch.empty(0, device=device)  # does torch take the driver?
    if has_named_optimizer(model) and device is not None:
        try_schedule(model)


def check_options(model: BaseModule, trainer: Any) -> None:
    """Raise UserError for options that torch or Lightning refuse together, in the first
    step. Of fused optimizers see Lightning's issue 21435. trainer: the Trainer's
    flags."""
    precision, every = str(trainer.precision), trainer.accumulate_grad_batches
    if (
        model.optimizer_args.get("fused")
        and trainer.gradient_clip_val
        and precision in MIXED
    ):
        what = f"a fused optimizer does not go with gradient_clip_val and precision {precision}"
        raise UserError(f"model.optimizer_args.fused true: {what}", "leave it out", 2)
    if model.compile_mode == "reduce-overhead" and every != 1:
        what = f"CUDA graphs do not go with accumulate_grad_batches {every}"
        raise UserError(
            f"model.compile_mode reduce-overhead: {what}", "leave one of them out", 2
        )


def returns_nothing(model: LightningModule, name: str, *callers: str) -> bool:
    """Whether a method has no `return` with a value: in its source, and in that of the
    methods of the model whose results it returns. False where the source does not
    tell."""
    try:
        source = inspect.getsource(getattr(model, name))
        (method,) = ast.parse(textwrap.dedent(source)).body
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return False
    if not isinstance(method, ast.FunctionDef) or method.decorator_list:
        return False
    nodes: list[ast.AST] = [*method.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Return) and not is_nothing(
            model, node.value, name, *callers
        ):
            return False
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)
    return True


def is_nothing(model: LightningModule, value: ast.expr | None, *methods: str) -> bool:
    """Whether an expression behind `return` is None, or the result of a method that
    returns nothing. methods: The one with this `return`, and those that have called
    it."""
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return True
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    is_of_self = (
        isinstance(value.func.value, ast.Name) and value.func.value.id == "self"
    )
    if not is_of_self or value.func.attr in methods:
        return False
    return returns_nothing(model, value.func.attr, *methods)


def has_test(model: LightningModule, data: LightningDataModule) -> bool:
    """Whether the model has a test_step and the data a test_dataloader."""
    return is_overridden("test_step", model) and is_overridden("test_dataloader", data)


def load_data(data: BaseDataModule, with_test: bool) -> None:
    """Load the training and validation samples, and the test samples; print their
    numbers."""
    data.prepare_data()
    data.setup("fit")
    check_transforms(data)
    if with_test:
        data.setup("test")
    sizes = {split: f"{len(samples):,}" for split, samples in data.splits.items()}
    text = f"Data: {type(data).__name__}, {sizes['train']} training and "
    text += f"{sizes.get('val', 0)} validation samples"
    if data.num_classes:
        text += f" of {data.num_classes} classes"
    text += f", batch size {data.batch_size}"
    if data.fold:
        text += f"; fold {data.fold.number} of {data.fold.num_folds} is the test set"
    say(text)


def check_transforms(data: BaseDataModule) -> None:
    """Raise UserError if `normalize` or `augment`, which get the first part of a batch
    alone, would leave other parts as they are that are like it: further images, masks,
    target images."""

    def overrides(*hooks: str) -> bool:
        return any(is_overridden(hook, data, BaseDataModule) for hook in hooks)

    batch = data.splits["train"].__getitems__([0])
    inputs = inputs_of(batch)
    if inputs is batch or not isinstance(inputs, Tensor):
        return
    if overrides("transform_batch", "on_after_batch_transfer"):
        return
    if not overrides("normalize", "augment"):
        return
    name, others = type(data).__name__, tensors_in(batch[1:])
    problem = ""
    if len(batch) > 2:
        problem = f"a batch of {name} has {len(batch)} parts"
    elif any(is_like(other, inputs) for other in others):
        problem = (
            f"both parts of a batch of {name} have the shape {tuple(inputs.shape[1:])}"
        )
    elif overrides("augment") and not has_random_flags_off(data):
        shapes = [tuple(other.shape[1:]) for other in others if inputs.dim() > 2]
        same = [shape for shape in shapes if shape[-2:] == tuple(inputs.shape[-2:])]
        if same:
            problem = (
                f"the targets {same[0]} of {name} are images of the size of the inputs"
            )
    if problem:
        what = f"{problem}, and normalize and augment get the first part only"
        raise UserError(
            what, "override transform_batch(batch, training), which gets all", 2
        )


def is_like(other: Tensor, inputs: Tensor) -> bool:
    """Whether a part of a batch is like the inputs: of their shape. A vector also has
    to have
    their dtype, and two numbers at least: targets may have as many values as inputs."""
    is_image = inputs.dim() > 2
    is_vector = inputs[0].numel() > 1 and other.dtype == inputs.dtype
    return other.shape == inputs.shape and (is_image or is_vector)


def has_random_flags_off(data: BaseDataModule) -> bool:
    """Whether the data has arguments such as random_crop, and all of them are off."""
    flags = [value for name, value in vars(data).items() if name.startswith("random_")]
    return bool(flags) and not any(flags)


def trial_device(trainer: Any) -> torch.device | None:
    """Return the device that the network will train on; None if the processes that
    train are forked from this one, which then must not start CUDA. trainer: the
    Trainer's flags."""
    if trainer.accelerator == "cpu" or not num_gpus():
        return torch.device("cpu")
    if forks_processes(trainer):
        return None
    indices = parse_devices(trainer.devices)
    index = indices[0] if isinstance(indices, list) else 0
    return (
        torch.device("cuda", index)
        if torch.cuda.is_available()
        else torch.device("mps")
    )


@short_device_errors()
@torch.no_grad()
def try_network(
    model: LightningModule, data: BaseDataModule, trainer: Any, split: str = "train"
) -> None:
    """Try `model.net` on two samples of a split, and print its number of parameters. It
    runs in eval mode, on the device and in the precision of the Trainer's flags. Only
    pairs whose inputs are one tensor are tried.

    Raises UserError if it cannot take the samples, or has fewer outputs than there are
    classes.
    """
    samples = data.splits[split]
    batch = samples.__getitems__(list(range(min(2, len(samples)))))
    inputs = None if targets_of(batch) is None else inputs_of(batch)
    device = trial_device(trainer)
    if (
        not isinstance(model, BaseModule)
        or not isinstance(inputs, Tensor)
        or device is None
    ):
        return
    if trainer.deterministic:
        # cuBLAS reads it at its first use, which is here; Lightning sets it later
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    net, name = model.net, type(model.net).__name__
    way_out = "change the arguments, such as --model.net.num_classes, or use --try_network false"
    batch = data.transform_batch(move_data_to_device(batch, device), training=False)
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor):
        return
    try:
        outputs = run_network(net.to(device), inputs, str(trainer.precision))
    except (RuntimeError, ValueError, AssertionError) as error:
        file, _ = raised_at(error)
        is_of_package = file.is_relative_to(Path(torch.__file__).parents[1])
        if isinstance(error, torch.OutOfMemoryError) or not is_of_package:
            raise  # it may be a bug of the user's
        what = f"the samples {tuple(inputs.shape[1:])} of {type(data).__name__}"
        raise UserError(
            f"{name} cannot take {what}: {first_line(error)}", way_out
        ) from error
    net.to(
        "cpu"
    )  # Lightning, and the processes that it starts, expect the network there
    num_classes = data.num_classes or 0
    num_trained = getattr(model, "num_classes", 0) or 0
    least = max(num_classes, num_trained)
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] < least:
        what = f"{outputs.shape[1]} outputs for the {num_classes} classes of {type(data).__name__}"
        raise UserError(
            f"{name} has {what} and model.num_classes {num_trained}", way_out
        )
    say(
        f"Network: {name}, {sum(parameter.numel() for parameter in net.parameters()):,} parameters"
    )


def run_network(net: nn.Module, inputs: Tensor, precision: str) -> Any:
    """Return the outputs of the network in eval mode. It has its modes afterwards."""
    training_modules = [module for module in net.modules() if module.training]
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    with (
        torch.autocast(inputs.device.type, dtype, enabled=precision in MIXED),
        isolate_rng(include_cuda=inputs.is_cuda),  # a lazy layer draws its weights
        torch.accelerator.device_index(
            inputs.device.index
        ),  # where kernels of Triton are launched
    ):
        outputs = net.eval()(for_network(inputs, net))
    for module in training_modules:  # frozen modules stay in eval mode
        module.training = True
    return outputs


def choose_selection(
    config: Any, model: LightningModule, data: LightningDataModule
) -> tuple[str, str] | None:
    """Return the metric that compares epochs, for best.ckpt and early stopping, and min
    or max: --monitor, by default the model's first one. Return None if best.ckpt is the
    last epoch. The test set never selects an epoch."""
    no_validation = why_unvalidated(config.trainer, model, data)
    if (
        no_validation
        and has_named_optimizer(model)
        and model.scheduler == "ReduceLROnPlateau"
    ):
        what = "--model.scheduler ReduceLROnPlateau needs a validation to go by"
        raise UserError(f"{what}: {no_validation}", status=2)
    monitor = config.monitor
    if monitor == "auto":
        names = (
            [*collection(model.metrics), "loss"]
            if isinstance(model, BaseModule)
            else []
        )
        monitor = (
            f"val/{names[0]}" if names else None
        )  # nobody knows what other modules log
    if no_validation or monitor is None:
        reason = no_validation or "no --monitor"
        if config.patience is not None:
            what = (
                f"--patience {config.patience} needs a metric of a validation to go by"
            )
            raise UserError(f"{what}: {reason}", status=2)
        say(f"best.ckpt is the last epoch ({reason})")
        return None
    if not monitor or monitor != monitor.strip():
        raise UserError(
            f"--monitor {monitor!r} is no metric's name, such as val/loss", status=2
        )
    mode = config.monitor_mode or better(monitor, model)
    say(
        f"Best epoch: the one with the {'lowest' if mode == 'min' else 'highest'} {monitor}"
    )
    return monitor, mode


def why_unvalidated(
    trainer: Any, model: LightningModule, data: LightningDataModule
) -> str | None:
    """Return why there is no validation to select by; None if there is one. trainer:
    its flags."""
    if isinstance(data, BaseDataModule) and not (
        data.val_fraction or "val" in data.own_splits
    ):
        return "data.val_fraction 0: val/ is measured on the test set"
    if trainer.limit_val_batches == 0:
        return "trainer.limit_val_batches 0"
    if not is_overridden("validation_step", model):
        return f"{type(model).__name__} has no validation_step"
    if not is_overridden("val_dataloader", data):
        return f"{type(data).__name__} has no val_dataloader"
    return None


def better(monitor: str, model: LightningModule) -> str:
    """Return min or max. torchmetrics says it of the model's metrics; of others the
    name may."""
    # not rpartition: a metric's name may contain "/"
    name = monitor.removeprefix("val/").partition("/dataloader_idx_")[0]
    metrics = (
        dict(collection(model.metrics).items()) if isinstance(model, BaseModule) else {}
    )
    is_higher_better = metrics[name].higher_is_better if name in metrics else None
    if is_higher_better is not None:
        return "max" if is_higher_better else "min"
    mode = better_by_name(name)
    if mode is None:
        question = f"--monitor {monitor}: is a higher or a lower value better?"
        way_out = "give --monitor_mode max or min, or --monitor val/loss"
        raise UserError(f"{question} {way_out}", status=2)
    return mode
