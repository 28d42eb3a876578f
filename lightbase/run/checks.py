"""Trials before a run starts: of the data, of the network on it, of the optimizer."""

import inspect
import os
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightbase.cli.config import KnowsClasses
from lightbase.data.batches import TensorBatches
from lightbase.data.module import BaseDataModule
from lightbase.devices.devices import num_gpus, parse_devices
from lightbase.devices.processes import short_process_errors
from lightbase.errors import UserError, first_line
from lightbase.metrics import check_names, collection
from lightbase.module import BaseModule, mean_over_views
from lightbase.ranks import say
from lightbase.resume.state import has_named_optimizer, schedule_at


def trial_device(trainer: Any) -> torch.device | None:
    """Where the Trainer's flags will have the network; None where this process must leave the GPU
    to its children."""
    if trainer.accelerator == "cpu" or not num_gpus():
        return torch.device("cpu")
    if str(trainer.strategy).startswith(("ddp_fork", "ddp_notebook")):
        return None
    indices = parse_devices(trainer.devices)
    index = indices[0] if isinstance(indices, list) else 0
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("mps")


def try_network(
    model: LightningModule, data: BaseDataModule, trainer: Any, split: str = "train"
) -> None:
    """Try `model.net` on two samples of a split, on the device and in the precision of the
    Trainer's flags, and print its size.

    Raises UserError if it cannot take them, or has not the outputs for their classes.
    """
    device, samples = trial_device(trainer), data.splits[split]
    inputs = samples.__getitems__(list(range(min(2, len(samples)))))[0]
    if not isinstance(model, BaseModule) or not isinstance(inputs, Tensor) or device is None:
        return
    net, name = model.net, type(model.net).__name__
    trained = [module for module in net.modules() if module.training]  # a frozen part may not be
    precision = str(trainer.precision)  # what is made for a GPU may know half precision alone
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    if (
        trainer.deterministic
    ):  # cuBLAS reads it once, here; Lightning sets it with the Trainer, which is too late
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    way_out = "change the arguments of model.net or of data{}, or use --try_network false"
    with torch.no_grad(), short_process_errors():
        inputs = data.normalize(inputs.to(device))
        try:
            with torch.autocast(
                device.type, dtype, enabled=precision in ("16", "bf16", "16-mixed", "bf16-mixed")
            ):
                outputs = net.to(device).eval()(inputs)
                if model.test_views is not None:
                    with torch.random.fork_rng(
                        [device] if device.type == "cuda" else []
                    ):  # views may be random
                        mean_over_views(net, model.test_views, inputs)
        except Exception as error:
            if not is_of_library(error) or isinstance(error, torch.OutOfMemoryError):
                raise
            cannot = (
                f"{name} cannot take the samples {tuple(inputs.shape[1:])} of {type(data).__name__}"
            )
            raise UserError(
                f"{cannot}: {first_line(error)}\n{way_out.format(', image_shape for instance')}"
            ) from error
    net.to("cpu")  # where Lightning, and the processes that it starts, expect it
    for module in trained:
        module.training = True
    # in a test the classes that it was trained with may be more
    most = model.num_classes if split == "train" and isinstance(model, KnowsClasses) else None
    num_outputs = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.dim() == 2 else None
    if num_outputs and not (data.num_classes or 0) <= num_outputs <= (most or num_outputs):
        classes = f"the {data.num_classes or most} classes of {type(data).__name__}"
        raise UserError(f"{name} has {num_outputs} outputs for {classes}\n{way_out.format('')}")
    say(f"Network: {name}, {sum(parameter.numel() for parameter in net.parameters()):,} parameters")


def check_augment(data: BaseDataModule) -> None:
    """Raises UserError if `augment`, which gets the inputs alone, would leave masks or target
    images behind."""
    if is_overridden("on_after_batch_transfer", data, BaseDataModule) or not may_augment(data):
        return
    inputs, targets = data.splits["train"].__getitems__([0])
    shapes: list[tuple[int, ...]] = []
    apply_to_collection(targets, Tensor, lambda target: shapes.append(tuple(target.shape[1:])))
    size = tuple(inputs.shape[-2:]) if isinstance(inputs, Tensor) and inputs.dim() > 2 else None
    if shape := next((shape for shape in shapes if shape[-2:] == size), None):
        what = (
            f"augment of {type(data).__name__} changes images and not their targets "
            f"{shape}, of the same size"
        )
        way_out = (
            "leave it out, or override on_after_batch_transfer(batch, dataloader_idx), "
            "which gets both"
        )
        raise UserError(f"{what}:\n{way_out}", 2)


def may_augment(data: BaseDataModule) -> bool:
    """Whether `augment` is overridden, and not by a class whose arguments random_crop, random_flip,
    ... are all off."""
    kind = next(kind for kind in type(data).__mro__ if "augment" in vars(kind))
    arguments = inspect.signature(vars(kind).get("__init__", object)).parameters
    flags = [vars(data).get(name, True) for name in arguments if name.startswith("random_")]
    return kind is not BaseDataModule and (not flags or any(flags))


def prepare(model: LightningModule, data: LightningDataModule, config: Any) -> None:
    """Give the network its weights, load the data and try the network on it, before a run folder
    exists."""
    if isinstance(model, BaseModule):
        check_names(["loss", *map(str, collection(model.metrics)), "num_samples"])
        model.prepare_weights()
    if isinstance(data, BaseDataModule):  # others may need the Trainer for it
        data.prepare_data()
        data.setup("fit")
        check_augment(data)
        if has_test(model, data):
            data.setup("test")  # what is wrong with it is found now, not after the training
        sizes = (
            f"{len(data.splits['train']):,} training and "
            f"{len(data.splits.get('val', ())):,} validation samples"
        )
        classes = f" of {data.num_classes} classes" if data.num_classes else ""
        fold = ""
        if data.fold:
            fold = (
                f"; fold {data.fold.number} of {data.fold.num_folds} is the test set, "
                f"{len(data.splits['test']):,}"
            )
        say(f"Data: {type(data).__name__}, {sizes}{classes}, batch size {data.batch_size}{fold}")
        are_arrays = isinstance(data.splits["train"], TensorBatches) and not data.num_workers
        if data.resident and not are_arrays and trial_device(config.trainer) != torch.device("cpu"):
            raise UserError(
                "data.resident true keeps arrays on the GPU, where workers cannot read: leave "
                "one out",
                2,
            )
        if config.try_network:
            try_network(model, data, config.trainer)
    # a step of torch's Adam wakes the GPU, also one on the CPU
    if has_named_optimizer(model) and trial_device(config.trainer) is not None:
        schedule_at(3, model, num_steps=100)  # a wrong argument is found before anything is written


def has_test(model: LightningModule, data: LightningDataModule) -> bool:
    return is_overridden("test_step", model) and is_overridden("test_dataloader", data)


def is_of_library(error: Exception) -> bool:
    """Whether an installed package refuses what it is given: in a network of its own for any
    reason, below a network of the user's by what torch raises for a wrong shape or type. Everything
    else may be a bug of the user's."""
    packages = Path(torch.__file__).parents[1]
    lines = traceback.extract_tb(error.__traceback__)[1:]
    foreign = [packages in Path(line.filename).parents for line in lines]
    is_refusal = isinstance(error, RuntimeError | ValueError | AssertionError)
    return all(foreign) or (foreign[-1] and is_refusal)
