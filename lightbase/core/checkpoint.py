"""The checkpoints of a run: written whole or not at all, by the run's rules, with all
the state that makes a resume exact."""

import copy
import io
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightbase.core.batches import tensors_in, to_host
from lightbase.core.command_line import renamed
from lightbase.core.compat import (
    data_fetcher,
    forget_train_loader,
    start_at_epoch_begin,
)
from lightbase.core.curves import gather
from lightbase.core.devices import devices_of
from lightbase.core.errors import UserError
from lightbase.core.folder import write_whole
from lightbase.core.form import check_like
from lightbase.core.module import BaseModule, has_named_optimizer
from lightbase.core.optim import IMPLEMENTATIONS, num_scheduler_steps, open_lengths
from lightbase.core.transfer import load_checked

MAX_PINNED = 2**28
"""Bytes of a checkpoint that take page-locked memory, which torch keeps. With more,
copying takes longer than waiting."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and moves it there, so that a file with
    that name is always whole. Lightning's move may be a copy, which a crash cuts short.

    validated: The weights that best.ckpt has to hold; None: any.
    """

    def __init__(self, validated: "ValidatedWeights | None" = None) -> None:
        super().__init__()
        self.validated = validated

    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        for key in {
            "hyper_parameters",
            "datamodule_hyper_parameters",
        } & checkpoint.keys():
            # for a person who reads the file: runs are rebuilt from their config
            checkpoint[key] = plain(checkpoint[key])
        path = Path(path)
        if self.validated and path.name == "best.ckpt":
            self.validated.check(checkpoint)
        buffer = io.BytesIO()
        torch.save(from_gpu(checkpoint), buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        way_out = "make room, then start again, or continue with --ckpt_path last"
        write_whole(path, buffer.getbuffer(), way_out)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return load_checked(Path(path))  # type: ignore[no-any-return]


def from_gpu(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with weights and optimizer states of a GPU on the CPU. The host
    waits once; torch.save would wait for each tensor, and is left those that share
    memory."""
    parts = {
        key: checkpoint[key]
        for key in checkpoint.keys() & {"state_dict", "optimizer_states"}
    }
    tensors = {
        id(x): x for x in tensors_in(parts) if x.is_cuda and x.layout is torch.strided
    }
    sizes = {x.data_ptr(): x.untyped_storage().nbytes() for x in tensors.values()}
    num_bytes = sum(x.nbytes for x in tensors.values())
    if not 0 < num_bytes == sum(sizes.values()) <= MAX_PINNED:
        return checkpoint
    return checkpoint | copy.deepcopy(parts, to_host(tensors))


def plain(value: Any) -> Any:
    """The value with everything in it that safe loading refuses, such as paths, turned
    into text."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), str)
    return value if value is None or type(value) is torch.Tensor else kind(value)


class ValidatedWeights(Callback):
    """Compares the weights in best.ckpt with those that its validation has measured.
    They differ if a callback changes them in between, as ModelPruning does.

    Must be the first callback: WeightAveraging takes its weights back when a validation
        ends.
    """

    def __init__(self) -> None:
        self.step = -1  # of the newest validation
        self.sums: dict[str, Tensor] = {}
        self.suspects = ""

    def on_validation_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        self.step = trainer.global_step
        tensors = {
            **dict(pl_module.named_parameters()),
            **dict(pl_module.named_buffers()),
        }
        self.sums = {
            name: fingerprint(tensor) for name, tensor in floats(tensors).items()
        }
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [x for x in callbacks if not isinstance(x, HARMLESS)]
        others = [x for x in others if not type(x).__module__.startswith("lightbase.")]
        names = [type(x).__name__ for x in others if overrides_any(x, Callback)]
        if overrides_any(pl_module, LightningModule):
            names.append(type(pl_module).__name__)
        self.suspects = " or ".join(names)

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Raise UserError if the weights in a checkpoint are others than those of the
        validation after the same step."""
        saved = floats(checkpoint["state_dict"])
        names = saved.keys() & self.sums.keys()
        if self.step != checkpoint["global_step"] or not names:
            return
        # a callback may have put a weight on another device
        now = {
            name: fingerprint(saved[name]).to(self.sums[name].device) for name in names
        }
        if not torch.stack(
            [(now[name] == self.sums[name]).all() for name in names]
        ).all():
            what = f"{self.suspects} changes the weights between a validation and best.ckpt"
            way_out = "change them after optimizer steps, in on_train_batch_end, or use --monitor null"
            raise UserError(
                f"{what}, which would hold others than were measured", way_out
            )


AFTER_VALIDATION = (
    *(
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
        "on_save_checkpoint",
    ),
)


HARMLESS = (Checkpoint, EarlyStopping, ProgressBar, Timer)
"""Callbacks of Lightning that have such hooks and change no weight."""


def overrides_any(callback: Any, base: type) -> bool:
    return any(is_overridden(hook, callback, base) for hook in AFTER_VALIDATION)


def floats(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of floating-point numbers that have values."""
    values = {
        name: x
        for name, x in tensors.items()
        if isinstance(x, Tensor) and not is_lazy(x)
    }
    return {
        name: x.detach()
        for name, x in values.items()
        if x.is_floating_point() and x.numel()
    }


def fingerprint(tensor: Tensor) -> Tensor:
    """Two sums over the bits of a tensor's numbers, weighted by row and by column:
    int64 (2,).

    They are exact, so that they do not depend on the layout in memory.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ]
    bits = tensor.view(integers).reshape(len(tensor) if tensor.dim() else 1, -1)
    sums = []
    for dim in (0, 1):
        sum_of_lines = bits.sum(dim, dtype=torch.int64)
        weights = torch.arange(1, len(sum_of_lines) + 1, device=bits.device)
        sums.append((sum_of_lines * weights).sum())
    return torch.stack(sums)


class RunCheckpoint(ModelCheckpoint):
    """Writes FILENAME.ckpt when an epoch ends: of the best epoch by `monitor`, or of
    the newest without a monitor.

    every_n_epochs: None writes after every validation.
    """

    def __init__(
        self,
        folder: Path,
        filename: str,
        monitor: str | None = None,
        mode: str = "min",
        keep_all: bool = False,
        every_n_epochs: int | None = 1,
    ) -> None:
        super().__init__(
            dirpath=folder,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=-1 if keep_all else 1,
            every_n_epochs=every_n_epochs,
            # at the very end, so that a resumed run starts with the next epoch
            save_on_train_epoch_end=every_n_epochs is not None,
            auto_insert_metric_name=False,
            enable_version_counter=False,  # the file is replaced, not numbered
        )
        self.step_at_epoch_end = 0

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}/{self.filename}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # ValidatedWeights would find it, at the end of a long training
            if isinstance(callback, StochasticWeightAveraging):
                what = f"{type(callback).__name__} averages weights after the last validation"
                raise UserError(what, "use WeightAveraging of Lightning, by steps", 2)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # without a validation yet, as with max_steps in the first epoch, there is
        # nothing to compare
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)
            self.step_at_epoch_end = trainer.global_step

    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        # Lightning cannot go on from the middle of a validation; and when an epoch has
        # ended, the checkpoint is there already
        between_batches = (
            trainer.training and self.step_at_epoch_end != trainer.global_step
        )
        if (
            isinstance(exception, SIGTERMException)
            and self.filename == "last"
            and between_batches
        ):
            trainer.save_checkpoint(
                Path(str(self.dirpath), "last.ckpt"), weights_only=False
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best score so far where the run goes on in its folder, also if
        that has been moved."""
        if not Path(str(self.dirpath), "last.ckpt").exists():
            return  # a new run that starts from another one's checkpoint
        state = state_dict | {"dirpath": str(self.dirpath)}
        for key in ("best_model_path", "last_model_path", "kth_best_model_path"):
            state[key] = self.in_folder(state[key])
        best = state["best_k_models"].items()
        if not all(isinstance(value, Tensor) for _, value in best):
            raise ValueError("the values of the best checkpoints are no numbers")
        state["best_k_models"] = {self.in_folder(path): value for path, value in best}
        super().load_state_dict(state)

    def in_folder(self, path: str) -> str:
        """Where a checkpoint of this callback is now. Lightning deletes the ones it
        replaces."""
        name = Path(path).name
        if path and not name.endswith(".ckpt"):
            raise ValueError(f"the path {path[:60]!r} is of no checkpoint")
        return path and str(Path(str(self.dirpath), name))


def as_built(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Change a saved state of an optimizer of the same parameters, so that it steps as
    it was
    built: `fused` and similar options stay, and its moments lie in memory as the
    weights do now, which a fused step relies on."""
    # torch itself reports a wrong number of groups
    for built, group in zip(
        optimizer.param_groups, saved["param_groups"], strict=False
    ):
        for name in (IMPLEMENTATIONS | {"name"}) & {*built, *group}:
            group[name] = built.get(name)
        for weight, index in zip(built["params"], group["params"], strict=False):
            state = saved["state"].get(index, {})
            check_moments(type(optimizer), weight, state)
            for name, value in state.items():
                if (
                    isinstance(value, Tensor)
                    and value.dim()
                    and value.shape == weight.shape
                ):
                    state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(
                        value
                    )
    groups = optimizer.state_dict()["param_groups"]
    check_like(saved["param_groups"], groups, "the optimizer", is_complete=False)
    known = {index for group in saved["param_groups"] for index in group["params"]}
    if not saved["state"].keys() <= known or any(
        "lr" not in x for x in saved["param_groups"]
    ):
        raise ValueError("the optimizer's state is not that of its parameters")


MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Adagrad: ("step", "sum"),
}
"""The state of a parameter in the optimizers whose fused step does not check it."""


def check_moments(optimizer: type, weight: Tensor, state: dict[str, Any]) -> None:
    """Raise ValueError for moments of another shape than their parameter: a fused step
    would read and write past their end."""
    if not state or optimizer not in MOMENTS:
        return
    for name in MOMENTS[optimizer]:
        if name not in state:
            raise ValueError(f"the optimizer's state has no {name} of a parameter")
    for name, value in state.items():
        shape = torch.Size() if name == "step" else weight.shape
        if value is None and name not in MOMENTS[optimizer]:
            continue  # SGD's momentum_buffer before the first step
        if (
            not isinstance(value, Tensor)
            or value.shape != shape
            or not value.is_floating_point()
        ):
            raise ValueError(
                f"{name} in the optimizer's state does not fit its parameter"
            )


class RandomState(Callback):
    """Keeps the random generators' states of all processes in checkpoints. Each process
    draws its
    own numbers: equal ones would be the same dropout on all of them."""

    resumed: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        is_alone = trainer.world_size == 1
        devices = (
            devices_of(trainer.strategy) if is_alone else [trainer.strategy.root_device]
        )
        self.gpus = [device for device in devices if device.type == "cuda"]

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": gather(random_state(self.gpus))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict["ranks"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        if rank < len(self.resumed):
            fresh = random_state([]) | {
                "cuda": None
            }  # another number of GPUs is allowed
            check_like(
                self.resumed[rank], fresh, "the state of the random numbers", 2**32
            )
            if not 0 <= self.resumed[rank]["numpy"][2] <= 624:
                raise ValueError(
                    "the state of numpy's random numbers is beyond its end"
                )
            restore_random_state(self.resumed[rank], self.gpus)
            loop: Any = trainer.fit_loop
            epochs = loop.epoch_progress.current
            if epochs.processed == epochs.ready:  # an epoch begins
                # again: a stock DataLoader draws its order from the generators
                iter(data_fetcher(trainer))
        elif rank > 0:
            seed = (torch.initial_seed() + rank) % 2**32
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        self.resumed = []


def is_epoch_over(trainer: Trainer) -> bool:
    """Whether all batches of this epoch were trained on."""
    num_batches = trainer.fit_loop.batch_idx + 1
    return num_batches >= trainer.num_training_batches or trainer.is_last_batch


class WholeEpochs(Callback):
    """Lightning takes an epoch that max_steps or max_time cuts short for a whole one,
    and a resume leaves out its rest; with max_steps it takes a resume from an epoch's
    end for one in its middle, and leaves out the next epoch."""

    def on_save_checkpoint(
        self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]
    ) -> None:
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        is_cut = not is_epoch_over(trainer)
        if is_cut and progress["current"]["processed"] == progress["current"]["ready"]:
            for counts in progress.values():
                counts["processed"] -= 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            start_at_epoch_begin(trainer)


class PlateauFirst(Checkpoint):
    """Steps each ReduceLROnPlateau at the end of an epoch, by Lightning's rules, before
    the checkpoint is written. Lightning steps it after that, so a resume would lose the
    step.

    A Checkpoint, so that the module's `on_train_epoch_end` is called before it: that
    may log the value.
    """

    resumed: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.frequencies = [
            (config, config.frequency)
            for config in trainer.lr_scheduler_configs
            if config.reduce_on_plateau and config.interval == "epoch"
        ]
        for config, _ in self.frequencies:
            config.frequency = sys.maxsize  # Lightning steps it in no epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_epoch_over(trainer):  # max_steps has cut it short
            return
        for config, frequency in self.frequencies:
            config.frequency = frequency
        trainer.fit_loop.epoch_loop.update_lr_schedulers(
            "epoch", update_plateau_schedulers=True
        )
        for config, _ in self.frequencies:
            config.frequency = sys.maxsize

    def on_save_checkpoint(
        self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]
    ) -> None:
        watched = {config.monitor for config, _ in self.frequencies}
        values = trainer.callback_metrics
        checkpoint["watched"] = {
            name: values[name] for name in watched if name in values
        }

    def on_load_checkpoint(
        self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.resumed = checkpoint.get("watched", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callback_metrics.update(self.resumed)  # of a validation before the stop


class ResumedOptimizer(Callback):
    """Lets a resumed optimizer step as this run has built it, and refuses a state of
    another one."""

    saved: tuple[list[Any], list[Any]] = ([], [])  # states of optimizers and schedules

    # states are restored after this hook
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(as_built)
        if trainer.ckpt_path:
            self.check_restored(trainer)
            # `trainer.estimated_stepping_batches` in configure_optimizers makes the
            # loaders before the epoch and the loader's state are restored; without them
            # Lightning makes them anew, and restores both
            forget_train_loader(trainer)

    def check_restored(self, trainer: Any) -> None:
        """Raise ValueError for states that are not those of the optimizers and
        schedules."""
        optimizers, schedules = self.saved
        built = [config.scheduler for config in trainer.lr_scheduler_configs]
        if (len(optimizers), len(schedules)) != (len(trainer.optimizers), len(built)):
            raise ValueError("there is another number of optimizers or schedules")
        for scheduler, saved in zip(built, schedules, strict=True):
            if type(scheduler).__module__.startswith(
                "torch.optim"
            ):  # of others nothing is known
                check_like(
                    saved, scheduler.state_dict(), "the schedule", is_complete=False
                )

    def on_save_checkpoint(
        self, _: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if has_named_optimizer(pl_module):
            checkpoint["schedule"] = schedule_options(pl_module)

    def on_load_checkpoint(
        self, trainer: Any, model: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        loops = trainer.fit_loop.state_dict()
        check_like(checkpoint["loops"]["fit_loop"], loops, "loops")
        self.saved = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
        if "schedule" in checkpoint and has_named_optimizer(model):
            # it may name a class of the user's package
            saved = renamed(checkpoint["schedule"], str(checkpoint["package"]))
            check_schedule(saved, model)
            check_length(checkpoint, model)


def check_schedule(saved: dict[str, Any], model: BaseModule) -> None:
    """Raise UserError where the code gives other options than the checkpoint has. In
    other groups a fused step would read the state of another parameter, past its
    end."""
    options = schedule_options(model)
    for name, value in saved.items():
        if value != options.get(name):
            what = f"{type(model).__name__} has the {name} {options.get(name)}"
            raise UserError(
                f"{what}: a resume goes on with {value}; leave --ckpt_path out",
                status=2,
            )


def check_length(checkpoint: dict[str, Any], model: BaseModule) -> None:
    """Raise UserError if the schedule is made for another length of the training."""
    name = model.scheduler
    if not isinstance(name, str) or not open_lengths(name, model.scheduler_args):
        return
    (saved,) = checkpoint["lr_schedulers"]
    old_length = saved.get("T_max", saved.get("total_steps"))
    every = model.step_scheduler_every()
    length = num_scheduler_steps(model.trainer, every)
    if length != old_length:
        what = f"model.scheduler {name} is made for {old_length} {every}s, not {length}"
        way_out = "a new run can start with its weights: --model.weights FILE, without --ckpt_path"
        raise UserError(what, way_out, 2)


def schedule_options(model: BaseModule) -> dict[str, Any]:
    """What sets the options of the optimizer's parameter groups, as a checkpoint can
    hold it."""
    names = ["lr", "optimizer_args", "scheduler", "scheduler_args"]
    names += ["parameter_groups"] if model.parameter_groups else []
    options: dict[str, Any] = plain({name: getattr(model, name) for name in names})
    return options | {"scheduler_interval": model.step_scheduler_every()}


def random_state(gpus: list[torch.device]) -> dict[str, Any]:
    """The state of the global random generators, as a checkpoint can hold it."""
    name, key, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus],
        "python": random.getstate(),
        # safe loading allows tensors, but no numpy arrays
        "numpy": [name, torch.tensor(np.asarray(key, dtype=np.int64)), *rest],
    }


def restore_random_state(state: dict[str, Any], gpus: list[torch.device]) -> None:
    torch.set_rng_state(state["torch"])
    for gpu, gpu_state in zip(
        gpus, state["cuda"], strict=False
    ):  # the number may have changed
        torch.cuda.set_rng_state(gpu_state, gpu)
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
