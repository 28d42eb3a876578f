"""The dry run: a mistake is found before a run has a folder.

`DryRun` loads the data, and tries the network and the optimizer. Without it, the same
mistakes end a training later, with longer errors.
"""

import ast
import inspect
import os
import re
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Subset

from lightbase.core.batches import (
    DatasetSamples,
    for_network,
    inputs_of,
    targets_of,
    tensors_in,
)
from lightbase.core.data import BaseDataModule
from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import MIXED, forks_processes, num_gpus, parse_devices
from lightbase.core.errors import UserError, first_line, raised_at, say
from lightbase.core.extra import Extra
from lightbase.core.folder import Run
from lightbase.core.module import BaseModule, has_named_optimizer
from lightbase.core.optim import (
    MISTAKES,
    build_optimizer,
    build_scheduler,
    check_options,
    grouped,
)
from lightbase.core.record import best_callback
from lightbase.core.spec import RunSpec
from lightbase.core.splits import class_numbers
from lightbase.core.testing import has_test

HOOKS = ("normalize", "augment", "transform_batch", "on_after_batch_transfer")
"""Hooks of BaseDataModule that change a batch. The first two get the inputs only."""
RANDOM_TRANSFORM = re.compile(
    r"\b(Random\w+|AutoAugment|RandAugment|TrivialAugment\w+|AugMix|ColorJitter)\b"
)
"""The name of a transform of torchvision that draws random numbers."""
SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
WAY_OUT = (
    "change the arguments, such as --model.net.num_classes, or use --try_network false"
)
"""What to do about a network that does not go with the data."""


class DryRun(Extra):
    """Tries the parts of a run before the run. What cannot be tried is checked in the
    training: the loss, and the metric of --monitor."""

    @short_device_errors()
    def before_run(
        self, spec: RunSpec, model: LightningModule, data: LightningDataModule
    ) -> None:
        """Load weights and data, and try network and optimizer.

        A mistake is found here, before the run has a folder. Of a plain LightningModule
        only `training_step` is checked; a plain LightningDataModule is not checked.

        Raise UserError with the way out.
        """
        config = spec.config
        if model.automatic_optimization and returns_nothing(model.training_step):
            raise UserError(
                f"training_step of {type(model).__name__} returns nothing, so nothing "
                "would train",
                "end it with `return loss`, the loss of the batch",
                2,
            )
        if config.trainer.limit_train_batches == 0:
            say("trainer.limit_train_batches 0: nothing is trained")
        check_combinations(model, config.trainer)
        if isinstance(model, BaseModule):
            model.prepare_weights()
        if type(data).train_dataloader is not BaseDataModule.train_dataloader:
            say(
                f"{type(data).__name__} has its own DataLoaders: a resume may end with "
                "other weights; several processes may count samples twice, and each "
                "trains on all of an IterableDataset"
            )
        if isinstance(data, BaseDataModule):
            load_data(data, with_test=has_test(model, data))
            if config.try_network:
                try_network(model, data, config.trainer)
        # A step of torch's Adam starts CUDA even on the CPU, and a process that forks
        # must not start it.
        if has_named_optimizer(model) and not forks_processes(config.trainer):
            try_schedule(model)

    @contextmanager
    def around_run(
        self, spec: RunSpec, model: LightningModule, run: Run | None
    ) -> Iterator[list[Logger]]:
        """Within this context, turn an error in a loss of torch or timm into a
        UserError: the loss does not go with the outputs of the network and the targets
        of the data.

        An error in a loss of the user's may be a bug, and is raised as it is.
        """
        try:
            yield []
        except (RuntimeError, TypeError, ValueError) as error:
            criterion = getattr(model, "criterion", None)
            is_in_loss = any(
                frame.f_locals.get("self") is criterion
                for frame, _ in traceback.walk_tb(error.__traceback__)
            )
            is_known = type(criterion).__module__.startswith(("torch.", "timm."))
            is_memory = isinstance(error, torch.OutOfMemoryError)
            if not is_in_loss or not is_known or is_memory:
                raise
            raise UserError(
                f"the loss {type(criterion).__name__} cannot take these outputs and "
                f"targets: {first_line(error)}",
                "give another --model.criterion, or change the step that calls it",
                2,
            ) from error

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise UserError if the sanity check has not logged the metric of --monitor.
        Lightning alone would find it only at the end of the first epoch."""
        best = best_callback(trainer)
        # Lightning keeps no values of several loaders here
        if not best or not best.monitor or len(trainer.num_sanity_val_batches) != 1:
            return
        names = trainer.callback_metrics
        if best.monitor not in names:
            raise UserError(
                f"--monitor {best.monitor!r} is not among the metrics of a validation: "
                f"{', '.join(names)}",
                status=2,
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
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return not any(node.value for node in returns)


def check_combinations(model: LightningModule, trainer: Any) -> None:
    """Raise UserError for options that torch or Lightning refuse together, but only in
    the training. Lightning's issue 21435 is about fused optimizers.

    trainer: The Trainer's flags.
    """
    clips = trainer.gradient_clip_val
    every = trainer.accumulate_grad_batches
    reason = ""
    if not model.automatic_optimization:
        if clips or every != 1:
            reason = "the module steps its optimizer itself (manual optimization)"
    elif isinstance(model, BaseModule):
        is_fused = model.optimizer_args.get("fused")
        if clips and is_fused and str(trainer.precision) in MIXED:
            reason = f"model.optimizer_args.fused true, precision {trainer.precision}"
        elif every != 1 and model.compile_mode == "reduce-overhead":
            reason = "model.compile_mode reduce-overhead (CUDA graphs)"
    if reason:
        raise UserError(
            f"trainer.gradient_clip_val {clips}, accumulate_grad_batches {every}: they "
            f"do not go with this: {reason}",
            "leave one of them out",
            2,
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
        if split in data.splits and not (split == "val" and data.validates_on_test):
            sizes.append(f"{len(data.splits[split]):,} {name}")
            if data.val_split == "grouped" and split in data.split_groups:
                sizes[-1] += f" ({len({*data.split_groups[split]}):,} groups)"
    text = f"Data: {type(data).__name__}, {', '.join(sizes)} samples"
    if data.num_classes:
        text += f" of {data.num_classes} classes"
    text += f", batch size {data.batch_size}"
    if data.train_weights is not None:
        text += "; training samples are drawn by weight"
    if data.fold:
        text += f"; fold {data.fold.number} of {data.fold.num_folds} is the test set"
    say(text)
    say_sparse_classes(data)
    say_random_validation(data)


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
    overridden = {hook for hook in HOOKS if is_overridden(hook, data, BaseDataModule)}
    if not overridden or not overridden <= {"normalize", "augment"}:
        return
    problem = ""
    if len(batch) > 2:
        problem = f"a batch of {type(data).__name__} has {len(batch)} parts"
    for target in tensors_in(batch[1:]):
        is_alike = target.shape == inputs.shape and target.dtype == inputs.dtype
        are_images = min(target.dim(), inputs.dim()) > 2
        is_mask = are_images and target.shape[-2:] == inputs.shape[-2:]
        # a single number is no vector: numbers are predicted from numbers
        is_alike = is_alike and inputs[0].numel() > 1
        if is_alike or (is_mask and "augment" in overridden):
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


def trial_device(trainer: Any) -> torch.device:
    """Return the device that the network will train on.

    trainer: The Trainer's flags.
    """
    if trainer.accelerator == "cpu" or not num_gpus():
        return torch.device("cpu")
    return torch.device(next(iter(parse_devices(trainer.devices)), 0))


@torch.no_grad()
def try_network(model: LightningModule, data: BaseDataModule, trainer: Any) -> None:
    """Try `model.net` on two training samples, and print its number of parameters.

    It runs in eval mode, on the device and in the precision of the Trainer's flags.
    Only pairs whose inputs are one tensor are tried.

    Raise UserError if the network cannot take the samples, or has fewer outputs than
    there are classes. An error in the user's code is raised as it is.
    """
    samples = data.splits["train"]
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


def say_sparse_classes(data: BaseDataModule) -> None:
    """Print one line if classes have no samples in a split, or fewer than two training
    samples. Print nothing if the class numbers are unknown, see `class_numbers`."""
    texts = []
    for split, samples in data.splits.items():
        labels = class_numbers(samples)
        if not data.classes or labels is None:
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


def say_random_validation(data: BaseDataModule) -> None:
    """Print one line if validation samples get random transforms of torchvision, which
    are in the attribute `transform` or `transforms` of a Dataset."""
    dataset: Any = data.splits["val"]
    while isinstance(dataset, DatasetSamples | Subset):
        dataset = dataset.dataset
    transforms = [getattr(dataset, name, "") for name in ("transform", "transforms")]
    found = RANDOM_TRANSFORM.search(str(transforms))
    if found:
        say(
            f"Validation: its samples get random transforms, too ({found[0]}): write "
            "load(self, split, training), and leave them out unless training"
        )


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
    elif args:
        raise UserError(f"model.scheduler_args {args} need a model.scheduler", status=2)
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler = None  # it steps after a validation
        if model.scheduler_interval == "step":
            raise UserError(
                "model.scheduler_interval step: ReduceLROnPlateau steps after a "
                "validation",
                "leave it out",
                2,
            )
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
