"""The dry run: mistakes that would end a training later, with longer errors, are found
before a run has a folder. The metric of --monitor and the loss are not tried.
"""

import os
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightbase.checks.data import check_columns, check_samples
from lightbase.checks.network import check_network
from lightbase.config.errors import UserError, first_line, say
from lightbase.config.known_errors import noted
from lightbase.config.spec import RunSpec
from lightbase.data.module import BaseDataModule
from lightbase.data.splits import class_numbers
from lightbase.data.tensors import for_network, inputs_of, targets_of, tensors_in
from lightbase.model.module import MIXED, BaseModule, has_named_optimizer
from lightbase.model.optim import (
    MISTAKES,
    build_optimizer,
    build_scheduler,
    check_options,
    grouped,
)
from lightbase.run.devices import forks_processes, num_gpus, parse_devices
from lightbase.run.fit import has_test

HOOKS = ("normalize", "augment", "transform_batch", "on_after_batch_transfer")
"""Hooks of BaseDataModule that change a batch. The first two get the inputs only."""

SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}


def dry_run(spec: RunSpec, model: LightningModule, data: LightningDataModule) -> None:
    """Load weights and data, and try network and optimizer. A plain LightningModule or
    LightningDataModule is not tried."""
    config = spec.config
    if isinstance(model, BaseModule):
        model.prepare_weights()
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=has_test(model, data))
        if config.checks and config.try_network:
            for check in (check_samples, check_columns):
                for line in check(data):
                    say(f"Data: {line}")
            try_network(model, data, config.trainer)
    # A step of torch's Adam starts CUDA even on the CPU, and a process that forks
    # must not start it.
    if has_named_optimizer(model) and not forks_processes(config.trainer):
        try_schedule(model)


@contextmanager
def noted_layer() -> Iterator[None]:
    """Within this context, add a note to each error: the innermost layer that was
    running, and the tensors that it was given."""
    running: list[tuple[nn.Module, Any]] = []

    def enter(layer: nn.Module, inputs: Any) -> None:
        running.append((layer, inputs))

    def leave(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        running.pop()

    # both are removed at the end of `with`
    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave):
        try:
            yield
        except Exception as error:
            if running:
                layer, inputs = running[-1]
                given = [f"{x.dtype} {tuple(x.shape)}" for x in tensors_in(inputs)]
                name = f"{type(layer).__name__}({layer.extra_repr()})"
                error.add_note(f"{name} got {', '.join(given)}")
            raise


def load_data(data: BaseDataModule, with_test: bool) -> None:
    """Load the samples for training and validation, and print how many there are.
    with_test: Load the test samples, too."""
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
            samples: Any = data.splits[split]
            size = "streamed"
            if isinstance(samples, Sized):
                size = f"{len(samples):,}"
            sizes.append(f"{size} {name}")
            if data.val_split == "grouped" and split in data.split_groups:
                sizes[-1] += f" ({len({*data.split_groups[split]}):,} groups)"
    if num_left_out := sum(data.num_left_out.values()):
        sizes.append(f"{num_left_out:,} left-out")
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
    images, further images. Data that overrides the hooks of all parts is not checked.

    A target has to change if it has the shape and dtype of the inputs, or if images are
    augmented that have its height and width.
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
    """Return the device of the training. trainer: The Trainer's flags."""
    if trainer.accelerator == "cpu" or not num_gpus():
        return torch.device("cpu")
    return torch.device(next(iter(parse_devices(trainer.devices)), 0))


@torch.no_grad()
def try_network(model: LightningModule, data: BaseDataModule, trainer: Any) -> None:
    """Try `model.net` on two samples of each split, and print its number of parameters.

    It runs in eval mode, on the device and in the precision of the Trainer's flags.
    Only pairs whose inputs are one tensor are tried. An error in the user's code is
    raised as it is.
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
    for split, samples in data.splits.items():
        num = 2
        if isinstance(samples, Sized):
            num = min(2, len(samples))
        batch = samples.__getitems__([*range(num)])
        batch = move_data_to_device(batch, device)
        batch = data.transform_batch(batch, training=False)
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


def check_outputs(outputs: Tensor, model: BaseModule, data: BaseDataModule) -> str:
    """Return a remark on outputs (2, num_outputs) of the network, or "". Raise
    UserError if there are fewer outputs than classes."""
    num_classes = data.num_classes or 0
    num_trained = getattr(model, "num_classes", 0) or 0
    num_outputs = outputs.shape[1]
    if num_outputs < max(num_classes, num_trained):
        raise UserError(
            f"{type(model.net).__name__} has {num_outputs} outputs for the "
            f"{num_classes} classes of {type(data).__name__} and model.num_classes "
            f"{num_trained}",
            "change an argument such as --model.net.num_classes, or the last layer",
        )
    is_softmax = (outputs.float().sum(1) - 1).abs().max() < 0.001
    if is_softmax and isinstance(model.criterion, nn.CrossEntropyLoss):
        return "; outputs sum up to 1: CrossEntropyLoss has its own softmax"
    are_logs = outputs.float().logsumexp(1).abs().max() < 0.001
    if isinstance(model.criterion, nn.NLLLoss) and not are_logs:
        return (
            "; outputs are no log-probabilities, which NLLLoss takes: end the network "
            "with nn.LogSoftmax(1), or use CrossEntropyLoss"
        )
    return ""


def run_network(net: nn.Module, inputs: Tensor, name: str, precision: str) -> Any:
    """Return the outputs of the network in eval mode. Afterwards each module is in the
    same mode as before. An error gets notes with the samples and the layer.

    inputs: (N, ...), on the device of the network. name: The class of the data, and
    the split; that of the training gets the checks.
    precision: The Trainer's flag as text.
    """
    training_modules = [module for module in net.modules() if module.training]
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    shape = tuple(inputs.shape[1:])
    note = f"{type(net).__name__} was tried with samples {shape} of {name}"
    with (
        noted(f"{note}; --checks false leaves this out"),
        noted_layer(),
        torch.autocast(inputs.device.type, dtype, enabled=precision in MIXED),
        isolate_rng(include_cuda=inputs.is_cuda),  # a lazy layer draws its weights
        # where kernels of Triton are launched
        torch.accelerator.device_index(inputs.device.index),
    ):
        inputs = for_network(inputs, net)
        outputs = net.eval()(inputs)
        if name.endswith("(train)") and len(inputs) == 2:
            for line in check_network(net, inputs, outputs):
                say(f"Network: {line}")
    if outputs is None:
        raise UserError(f"{type(net).__name__}.forward returns nothing", status=2)
    for module in training_modules:  # frozen modules stay in eval mode
        module.training = True
    return outputs


def say_sparse_classes(data: BaseDataModule) -> None:
    """Print one line if classes, whose numbers are known, have no samples in a split,
    or fewer than two training samples."""
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
    """Build the optimizer and scheduler of a BaseModule for a hundred steps, and make
    three of them. One number takes the place of the parameters of each group, so this
    takes no time."""
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
    steps: list[Any] = [lambda: optimizer.step(lambda: 0.0)]  # LBFGS asks for the loss
    if name is not None:
        scheduler = build_scheduler(name, args, optimizer, 100)
        if not isinstance(scheduler, ReduceLROnPlateau):  # it steps after a validation
            steps.append(scheduler.step)
    elif args or model.scheduler_interval:
        raise UserError(
            f"model.scheduler_args {args}, scheduler_interval "
            f"{model.scheduler_interval}: they need a model.scheduler",
            status=2,
        )
    try:
        for step in 3 * steps:
            step()
    except MISTAKES as error:
        raise UserError(
            f"model.optimizer {model.optimizer} with {model.optimizer_args} and "
            f"model.scheduler {name} with {args}: {first_line(error)}",
            status=2,
        ) from error
