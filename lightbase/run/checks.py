"""Checks before a run starts: of the data, of the network on two samples, of the optimizer."""

import os
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightbase.cli.config import KnowsClasses
from lightbase.data.batches import TensorBatches
from lightbase.data.module import BaseDataModule
from lightbase.devices.devices import num_gpus, parse_devices, short_device_errors
from lightbase.errors import UserError, first_line
from lightbase.metrics import check_names, collection
from lightbase.module import BaseModule, has_named_optimizer, mean_over_views
from lightbase.optim import schedule_at
from lightbase.ranks import say


@short_device_errors()
def prepare(model: LightningModule, data: LightningDataModule, config: Any) -> None:
    """Load weights and data, and try network and optimizer. A mistake is found here, before the
    run has a folder. A plain LightningModule or LightningDataModule is not checked."""
    if isinstance(model, BaseModule):
        check_names(["loss", *map(str, collection(model.metrics)), "num_samples"])
        check_compiling(model, config.trainer)
        model.prepare_weights()
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=has_test(model, data))
        check_resident(data, config.trainer)
        if config.try_network:
            try_network(model, data, config.trainer)
    # a step of torch's Adam starts CUDA even on the CPU, and a process that forks must not start it
    device = trial_device(config.trainer)
    if device is not None:
        torch.empty(0, device=device)  # does torch take the driver?
    if has_named_optimizer(model) and device is not None:
        schedule_at(3, model, num_steps=100)


def check_compiling(model: BaseModule, trainer: Any) -> None:
    """Raise UserError if CUDA graphs would overwrite the gradients of the batch before (pytorch
    issue 169545). trainer: the Trainer's flags."""
    is_graph = model.compile_net and model.compile_mode in ("reduce-overhead", "max-autotune")
    num_batches = trainer.accumulate_grad_batches
    if is_graph and num_batches > 1 and trial_device(trainer) != torch.device("cpu"):
        what = f"model.compile_mode {model.compile_mode} launches CUDA graphs, which cannot add up"
        what += f" the gradients of trainer.accumulate_grad_batches {num_batches}"
        raise UserError(f"{what}:\nleave one out", 2)


def has_test(model: LightningModule, data: LightningDataModule) -> bool:
    """Whether the model has a test_step and the data a test_dataloader."""
    return is_overridden("test_step", model) and is_overridden("test_dataloader", data)


def load_data(data: BaseDataModule, with_test: bool) -> None:
    """Load the training and validation samples, and the test samples; print their numbers."""
    data.prepare_data()
    data.setup("fit")
    check_augment(data)
    if with_test:
        data.setup("test")
    sizes = {split: len(samples) for split, samples in data.splits.items()}
    text = f"Data: {type(data).__name__}, {sizes['train']:,} training and "
    text += f"{sizes.get('val', 0):,} validation samples"
    if data.num_classes:
        text += f" of {data.num_classes} classes"
    text += f", batch size {data.batch_size}"
    if data.fold:
        text += f"; fold {data.fold.number} of {data.fold.num_folds} is the test set, "
        text += f"{sizes.get('test', 0):,}"
    say(text)


def check_augment(data: BaseDataModule) -> None:
    """Raise UserError if `augment`, which gets the inputs alone, would change images and leave
    their masks or target images as they are."""
    if is_overridden("on_after_batch_transfer", data, BaseDataModule) or not may_augment(data):
        return
    inputs, targets = data.splits["train"].__getitems__([0])
    if not isinstance(inputs, Tensor) or inputs.dim() < 3:
        return
    shapes: list[tuple[int, ...]] = []
    apply_to_collection(targets, Tensor, lambda target: shapes.append(tuple(target.shape[1:])))
    for shape in shapes:
        if shape[-2:] == tuple(inputs.shape[-2:]):
            what = f"augment of {type(data).__name__} changes images and not their targets {shape}"
            way_out = "override on_after_batch_transfer(batch, dataloader_idx), which gets both"
            raise UserError(f"{what}, of the same size:\nleave it out, or {way_out}", 2)


def may_augment(data: BaseDataModule) -> bool:
    """Whether `augment` is overridden, and not switched off by arguments such as random_flip."""
    flags = [value for name, value in vars(data).items() if name.startswith("random_")]
    return is_overridden("augment", data, BaseDataModule) and (not flags or any(flags))


def check_resident(data: BaseDataModule, trainer: Any) -> None:
    """Raise UserError if the data is to stay on a GPU and cannot. trainer: the Trainer's flags."""
    is_in_memory = isinstance(data.splits["train"], TensorBatches) and not data.num_workers
    if data.resident and not is_in_memory and trial_device(trainer) != torch.device("cpu"):
        what = "data.resident true keeps arrays on the GPU, where workers cannot read"
        raise UserError(f"{what}: leave one out", 2)


def trial_device(trainer: Any) -> torch.device | None:
    """Return the device that the network will train on; None if the processes that train are forked
    from this one, which then must not start CUDA. trainer: the Trainer's flags."""
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
    """Try `model.net` on two samples of a split and print its number of parameters. It runs on the
    device and in the precision of the Trainer's flags.

    Raises UserError if it cannot take the samples, or if its outputs do not fit the classes.
    """
    samples = data.splits[split]
    inputs = samples.__getitems__(list(range(min(2, len(samples)))))[0]
    device = trial_device(trainer)
    if not isinstance(model, BaseModule) or not isinstance(inputs, Tensor) or device is None:
        return
    if trainer.deterministic:
        # cuBLAS reads it at its first use, which is here; Lightning sets it later
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    net, name = model.net, type(model.net).__name__
    training_modules = [module for module in net.modules() if module.training]
    with short_device_errors():
        with torch.no_grad():
            inputs = data.normalize(inputs.to(device))
        try:
            outputs = run_network(model, inputs, str(trainer.precision))
        except Exception as error:
            if not is_of_library(error) or isinstance(error, torch.OutOfMemoryError):
                raise
            what = f"the samples {tuple(inputs.shape[1:])} of {type(data).__name__}"
            way_out = "change the arguments of model.net or of data, image_shape for instance"
            raise UserError(
                f"{name} cannot take {what}: {first_line(error)}\n"
                f"{way_out}, or use --try_network false"
            ) from error
    net.to("cpu")  # Lightning, and the processes that it starts, expect the network there
    for module in training_modules:  # frozen modules stay in eval mode
        module.training = True
    # a test set may have fewer classes than the network was trained with
    num_trained = model.num_classes if isinstance(model, KnowsClasses) else None
    check_num_outputs(name, outputs, data, num_trained if split == "train" else None)
    say(f"Network: {name}, {sum(parameter.numel() for parameter in net.parameters()):,} parameters")


@torch.no_grad()
def run_network(model: BaseModule, inputs: Tensor, precision: str) -> Any:
    """Return the outputs of `model.net` in eval mode; call test_views, too, if there are any."""
    net: nn.Module = model.net.to(inputs.device).eval()
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    is_half = precision in ("16", "bf16", "16-mixed", "bf16-mixed")
    with torch.autocast(inputs.device.type, dtype, enabled=is_half):
        outputs = net(inputs)
        if model.test_views is not None:
            gpus = [inputs.device] if inputs.device.type == "cuda" else []
            with torch.random.fork_rng(gpus):  # views may draw random numbers
                mean_over_views(net, model.test_views, inputs)
    return outputs


def check_num_outputs(
    name: str, outputs: Any, data: BaseDataModule, num_trained: int | None
) -> None:
    """Raise UserError if the network has fewer outputs than the data has classes, or more than the
    model was built for. name: of the network. num_trained: None does not check for more."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        return
    num_outputs = outputs.shape[1]
    is_too_few = num_outputs < (data.num_classes or 0)
    is_too_many = num_outputs > (num_trained or num_outputs)
    if num_outputs and (is_too_few or is_too_many):
        classes = f"the {data.num_classes or num_trained} classes of {type(data).__name__}"
        way_out = "change the arguments of model.net or of data, or use --try_network false"
        raise UserError(f"{name} has {num_outputs} outputs for {classes}\n{way_out}")


def is_of_library(error: Exception) -> bool:
    """Whether an installed package refuses what it is given: in a network of its own for any
    reason, below a network of the user's by what torch raises for a wrong shape or type. Everything
    else may be a bug of the user's."""
    packages = Path(torch.__file__).parents[1]
    lines = traceback.extract_tb(error.__traceback__)[1:]
    foreign = [packages in Path(line.filename).parents for line in lines]
    is_refusal = isinstance(error, RuntimeError | ValueError | AssertionError)
    return all(foreign) or (foreign[-1] and is_refusal)
