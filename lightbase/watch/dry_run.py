"""The dry run: a mistake is found before a run has a folder.

`dry_run` loads the data, and tries the network and the optimizer. Without it, the same
mistakes end a training later, with longer errors. The metric of --monitor and the loss
are checked in the training.
"""

import inspect
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightbase.config.errors import UserError, first_line, is_users, say
from lightbase.config.spec import RunSpec
from lightbase.data.batches import (
    for_network,
    inputs_of,
    targets_of,
    tensors_in,
)
from lightbase.data.module import BaseDataModule
from lightbase.data.splits import class_numbers
from lightbase.model.module import MIXED, BaseModule, has_named_optimizer
from lightbase.model.optim import (
    MISTAKES,
    build_optimizer,
    build_scheduler,
    check_options,
    grouped,
)
from lightbase.run.devices import (
    forks_processes,
    num_gpus,
    parse_devices,
    short_device_errors,
)
from lightbase.run.fit import has_test

HOOKS = ("normalize", "augment", "transform_batch", "on_after_batch_transfer")
"""Hooks of BaseDataModule that change a batch. The first two get the inputs only."""

SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}


@short_device_errors()
def dry_run(spec: RunSpec, model: LightningModule, data: LightningDataModule) -> None:
    """Load weights and data, and try network and optimizer.

    Of a plain LightningModule only `training_step` is checked; a plain
    LightningDataModule is not checked.

    Raise UserError with the way out.
    """
    config = spec.config
    check_returns(model, data)
    if isinstance(model, BaseModule):
        model.prepare_weights()
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=has_test(model, data))
        if config.try_network:
            try_network(model, data, config.trainer)
    # A step of torch's Adam starts CUDA even on the CPU, and a process that forks
    # must not start it.
    if has_named_optimizer(model) and not forks_processes(config.trainer):
        try_schedule(model)


def check_returns(model: LightningModule, data: LightningDataModule) -> None:
    """Raise UserError if the source of a method that has to return something does not
    have the word `return`. A method without a source, or with a decorator, passes.

    If it has a `return` and returns None all the same, Lightning warns of it.
    """
    methods: list[Any] = [
        getattr(data, name, None) for name in ("load", "collate", *HOOKS)
    ]
    if isinstance(model, BaseModule):
        methods.append(model.net.forward)
    if model.automatic_optimization:
        methods += [model.training_step, model.configure_optimizers]
    for method in methods:
        try:
            source = inspect.getsource(method)
        except (OSError, TypeError):
            continue
        # neither with a decorator, nor a lambda
        if re.match(r"(?s)\s*def (?!.*\b(?:return|yield|raise)\b)", source):
            raise UserError(
                f"{method.__qualname__} returns nothing",
                "end it with `return` and its result, such as the loss of the batch",
                2,
            )


@contextmanager
def short_misfits(module: Any, problem: str, way_out: str = "") -> Iterator[None]:
    """Within this context, turn an error of a layer of a package into a UserError, if
    the layer is `module` or `module` has called it. The message has the arguments of
    the layer, and the tensors that it was given.

    way_out: By default `fit_layer` finds one.

    An error in the user's code may be a bug, and is raised as it is.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        layers = []
        for frame, _ in traceback.walk_tb(error.__traceback__):
            layer = frame.f_locals.get("self")
            if isinstance(layer, nn.Module):
                layers.append(layer)
                values, file = frame.f_locals.values(), frame.f_code.co_filename
        if module not in layers or is_users(file):
            raise
        # parameters have another type
        given = [x for x in values if type(x) is Tensor]
        of_device = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
        if of_device or not (given or way_out):
            raise
        layer = layers[-1]
        texts = [f"{x.dtype} {tuple(x.shape)}" for x in given]
        raise UserError(
            f"{problem}: {type(layer).__name__}({layer.extra_repr()}) got "
            f"{', '.join(texts)}: {first_line(error)}",
            way_out or fit_layer(layer, given[0]),
            2,
        ) from error


def fit_layer(layer: Any, inputs: Tensor) -> str:
    """Return what to do about a layer that cannot take its inputs."""
    size = getattr(layer, "in_features", getattr(layer, "in_channels", 0))
    if size and inputs.dtype != torch.float32:
        return "let `normalize` return float32, such as to_float(inputs, mean, std)"
    if inputs[0].numel() == size:
        return "flatten each sample before this layer: x.flatten(1)"
    if inputs.shape[-1] == size:
        return "channels come first: give images (N, C, H, W), see torch.permute"
    return (
        "change the size of this layer, in the code or by an argument of --model.net, "
        "or what comes before it; --try_network false leaves this check out"
    )


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
    sizes = []
    for split, name in SPLIT_NAMES.items():
        if is_overridden(f"{split}_dataloader", data, BaseDataModule):
            continue  # the samples of its loaders are others
        if split in data.splits and not (split == "val" and data.validates_on_test):
            sizes.append(f"{len(data.splits[split]):,} {name}")
            if data.val_split == "grouped" and split in data.split_groups:
                sizes[-1] += f" ({len({*data.split_groups[split]}):,} groups)"
    text = f"Data: {type(data).__name__}, {', '.join(sizes)} samples"
    if data.num_classes:
        text += f" of {data.num_classes} classes"
    text += f", batch size {data.batch_size}"
    if data.fold:
        text += f"; fold {data.fold.number} of {data.fold.num_folds} is the test set"
    say(text)
    say_sparse_classes(data)


def check_transforms(data: BaseDataModule) -> None:
    """Raise UserError if `normalize` or `augment`, which get the inputs only, would
    leave a part of the batch unchanged that has to change with them: masks, target
    images, further images.

    Data that overrides `transform_batch` or `on_after_batch_transfer`, which get all
    parts, is not checked. A target has to change if it has the shape and dtype of the
    inputs, or if images are augmented that have its height and width.
    """
    batch = data.splits["train"].__getitems__([0])
    inputs = inputs_of(batch)
    if inputs is batch or not isinstance(inputs, Tensor):
        return
    overridden = {hook for hook in HOOKS if is_overridden(hook, data, BaseDataModule)}
    if not overridden or not overridden <= {"normalize", "augment"}:
        return
    has_to_change = len(batch) > 2
    for target in tensors_in(batch[1:]):
        if target.shape == inputs.shape and target.dtype == inputs.dtype:
            # numbers are predicted from a single number
            has_to_change = has_to_change or inputs[0].numel() > 1
        are_images = min(target.dim(), inputs.dim()) > 2
        if are_images and target.shape[-2:] == inputs.shape[-2:]:
            has_to_change = has_to_change or "augment" in overridden
    if has_to_change:
        raise UserError(
            f"{type(data).__name__}: normalize and augment get the first part of a "
            "batch only, and others have to change with it",
            "override transform_batch(batch, training), which gets all",
            2,
        )


def trial_device(trainer: Any) -> torch.device:
    """Return the device that the network will train on.

    trainer: The Trainer's flags.
    """
    if trainer.accelerator == "cpu" or not num_gpus():
        return torch.device("cpu")
    return torch.device(next(iter(parse_devices(trainer.devices)), 0))


@torch.no_grad()
def try_network(model: LightningModule, data: BaseDataModule, trainer: Any) -> None:
    """Try `model.net` on two samples of each split, and print its number of parameters.

    It runs in eval mode, on the device and in the precision of the Trainer's flags.
    Only pairs whose inputs are one tensor are tried.

    Raise UserError if the network cannot take the samples, or has fewer outputs than
    there are classes. An error in the user's code is raised as it is.
    """
    # a process that is forked cannot use CUDA if this one has started it
    if not isinstance(model, BaseModule) or forks_processes(trainer):
        return
    device = trial_device(trainer)
    if trainer.deterministic:
        # cuBLAS reads it at its first use, which is here; Lightning sets it later.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    net = model.net
    outputs: dict[str, Any] = {}
    for split in data.splits:
        batch = two_samples(data, split, device)
        inputs = inputs_of(batch)
        if targets_of(batch) is not None and isinstance(inputs, Tensor):
            name = f"{type(data).__name__} ({split})"
            precision = str(trainer.precision)
            outputs[split] = run_network(net.to(device), inputs, name, precision)
    # Lightning, and the processes that it starts, expect the network there.
    net.to("cpu")
    if "train" not in outputs:
        say("Network: not tried: a batch is not a pair (inputs, targets) of tensors")
        return
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    text = f"Network: {type(net).__name__}, {num_parameters:,} parameters"
    if isinstance(outputs["train"], Tensor) and outputs["train"].dim() == 2:
        text += check_outputs(outputs["train"], model, data)
    say(text)


def two_samples(data: BaseDataModule, split: str, device: torch.device) -> Any:
    """Return a batch of two samples, or of one if there are no more, as the network
    gets it."""
    samples = data.splits[split]
    batch = samples.__getitems__([*range(len(samples))[:2]])
    return data.transform_batch(move_data_to_device(batch, device), training=False)


def check_outputs(outputs: Tensor, model: BaseModule, data: BaseDataModule) -> str:
    """Return a remark on the outputs of the network for two samples, or "". Raise
    UserError if there are fewer of them than classes.

    outputs: (2, num_outputs).
    """
    num_classes = data.num_classes or 0
    num_trained = getattr(model, "num_classes", 0) or 0
    most_classes = max(num_classes, num_trained)
    num_outputs = outputs.shape[1]
    if num_outputs < most_classes:
        raise UserError(
            f"{type(model.net).__name__} has {num_outputs} outputs for the "
            f"{num_classes} classes of {type(data).__name__} and model.num_classes "
            f"{num_trained}",
            "change an argument such as --model.net.num_classes, or the last layer",
        )
    is_softmax = (outputs.float().sum(1) - 1).abs().max() < 0.001
    if is_softmax and isinstance(model.criterion, nn.CrossEntropyLoss):
        return "; outputs sum up to 1: CrossEntropyLoss has its own softmax"
    return ""


def run_network(net: nn.Module, inputs: Tensor, name: str, precision: str) -> Any:
    """Return the outputs of the network in eval mode. Afterwards each module is in the
    same mode as before, so that frozen modules stay in eval mode.

    inputs: (N, ...), on the device of the network.
    name: The class of the data.
    precision: The Trainer's flag as text.

    Raise UserError if a layer cannot take what it gets. An error in the user's code is
    raised as it is.
    """
    training_modules = [module for module in net.modules() if module.training]
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    problem = f"{type(net).__name__} cannot take the samples {tuple(inputs.shape[1:])}"
    with (
        short_misfits(net, f"{problem} of {name}"),
        torch.autocast(inputs.device.type, dtype, enabled=precision in MIXED),
        isolate_rng(include_cuda=inputs.is_cuda),  # a lazy layer draws its weights
        # where kernels of Triton are launched
        torch.accelerator.device_index(inputs.device.index),
    ):
        outputs = net.eval()(for_network(inputs, net))
    for module in training_modules:  # frozen modules stay in eval mode
        module.training = True
    return outputs


def say_sparse_classes(data: BaseDataModule) -> None:
    """Print one line if classes have no samples in a split, or fewer than two training
    samples. Print nothing if the class numbers are unknown, see `class_numbers`."""
    texts = []
    for split, samples in data.splits.items():
        labels = class_numbers(samples)
        # a Dataset may return other targets than its attribute `targets` has
        if labels is None or labels.max() >= len(data.classes):
            continue
        amount, least = "no", 1
        if split == "train":
            amount, least = "at most one", 2
        counts = labels.bincount(minlength=len(data.classes))
        names = [data.classes[i] for i in (counts < least).nonzero()]
        if names:
            few = ", ".join(names[:3])
            texts.append(f"{amount} {split} sample of {few} ({len(names)} in all)")
    if texts:
        say(f"Classes: {'; '.join(texts)}")


def try_schedule(model: Any) -> None:
    """Build the model's optimizer and scheduler for a hundred steps, and make three of
    them.

    model: A BaseModule with the names of its optimizer and scheduler. One number takes
        the place of the parameters of each group, so this takes no time.

    Raise UserError for names or arguments that do not work.
    """
    groups = grouped(model.named_parameters(), model.parameter_groups)
    for group in groups:
        parameter = Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        group["params"] = [parameter]
    optimizer = build_optimizer(
        model.optimizer, model.optimizer_args, groups, model.lr, fused=True
    )
    check_options(model.parameter_groups, optimizer)
    name, args = model.scheduler, model.scheduler_args
    scheduler = None
    if name is not None:
        scheduler = build_scheduler(name, args, optimizer, 100)
    elif args or model.scheduler_interval:
        raise UserError(
            f"model.scheduler_args {args}, scheduler_interval "
            f"{model.scheduler_interval}: they need a model.scheduler",
            status=2,
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler = None  # it steps after a validation
    try:
        for _ in range(3):
            optimizer.step(lambda: 0.0)  # LBFGS calls it for the loss
            if scheduler:
                scheduler.step()
    except MISTAKES as error:
        raise UserError(
            f"model.optimizer {model.optimizer} with {model.optimizer_args} and "
            f"model.scheduler {name} with {args}: {first_line(error)}",
            status=2,
        ) from error
