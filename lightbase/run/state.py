"""The state of a training beside its weights, so that a resume is exact.

Four callbacks: `RandomState` keeps the random numbers, and repeats the start of an
epoch. `WholeEpochs` keeps whether an epoch was complete. `PlateauFirst` steps
ReduceLROnPlateau before the checkpoint. `ResumedOptimizer` adapts the saved states of
optimizers and schedules to the objects of this run.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

from lightbase.compat import (
    batch_index,
    begin_epoch_again,
    call_epoch_start,
    forget_train_loader,
    replace_epoch_start,
    restore_checkpoint,
    resumes_at_epoch_start,
    resumes_within_epoch,
    saved_epochs,
    skip_ended_epoch,
    take_over_plateau_schedules,
)
from lightbase.config.errors import UserError, say
from lightbase.config.spec import as_plain
from lightbase.config.yaml_files import renamed
from lightbase.data.loader import (
    GENERATORS,
    ResumableLoader,
    set_state,
    state_of,
)
from lightbase.data.stream import StreamLoader
from lightbase.model.curves import gather
from lightbase.model.module import BaseModule, has_named_optimizer
from lightbase.model.optim import (
    FUSED_ON,
    IMPLEMENTATIONS,
    length_argument,
    schedule_length,
)
from lightbase.run.devices import devices_of

NEW_RUN = (
    "a new run can begin with the weights, without --ckpt_path and with "
    "--model.weights FILE"
)


class RandomState(Callback):
    """Keeps the states of the random generators of all processes in checkpoints. Each
    process draws other numbers; with equal ones, dropout would be the same in all.

    In a resume within an epoch, Lightning leaves out the hooks on_train_epoch_start.
    They are called again here, with the numbers that the epoch began with.

    resumed: The saved states of all processes, until the first epoch starts.
    epoch_start: The random state before the hooks of this epoch's start.
    """

    resumed: list[dict[str, Any]] = []
    epoch_start: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the GPUs of this process. With dp, one process has several."""
        self.trainer = trainer
        devices = [trainer.strategy.root_device]
        if trainer.world_size == 1:
            devices = devices_of(trainer.strategy)
        self.gpus = [device for device in devices if device.type == "cuda"]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes, by rank. All processes call this."""
        return {"ranks": gather(self.state() | {"epoch_start": self.epoch_start})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict["ranks"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give each process other random numbers. In a run that resumes, the hooks
        on_train_start draw the same numbers as in its first start."""
        if rank := trainer.global_rank:
            seed = (torch.initial_seed() + rank) % 2**32
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        replace_epoch_start(trainer, self.begin_epoch)

    def begin_epoch(self, begin: Callable[[], None]) -> None:
        """Begin an epoch. If the run resumes, restore the random state of this process,
        and repeat what Lightning leaves out. Processes without a saved state keep their
        random numbers.

        begin: Lightning's function. It calls the hooks on_train_epoch_start, except
            within an epoch.
        """
        is_resumed = bool(self.resumed)
        is_within = resumes_within_epoch(self.trainer)
        now = self.state()
        if self.trainer.global_rank < len(self.resumed):
            now = self.resumed[self.trainer.global_rank]
        # a fresh state, or one of version 0.3, is itself the start of the epoch
        saved_start = now.pop("epoch_start", now)
        self.epoch_start = now
        if is_within or resumes_at_epoch_start(self.trainer):
            self.epoch_start = saved_start
        self.restore(self.epoch_start)
        begin()
        if is_within:
            call_epoch_start(self.trainer)
            # the hooks ran before the checkpoint, too: undo what they changed now
            restore_checkpoint(self.trainer)
            self.restore(now)
        elif is_resumed:  # torch's DataLoader draws its order from the state
            begin_epoch_again(self.trainer)
        self.resumed = []

    def state(self) -> dict[str, Any]:
        """Return the state of all random generators of this process."""
        own = own_generators(self.trainer)
        states = {name: state_of(own[name]) for name in own}
        return random_state(self.gpus) | {"own": states}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the random generators of this process to a state, if it has theirs."""
        restore_random_state(state, self.gpus)
        saved = state.get("own", {})  # until version 0.3 there is none
        for name, generator in own_generators(self.trainer).items():
            if name in saved:
                set_state(generator, saved[name])


def own_generators(trainer: Any) -> dict[str, Any]:
    """Return {OWNER.ATTRIBUTE: generator} for the attributes of modules, of the data
    module and of callbacks."""
    owners = dict(trainer.lightning_module.named_modules())
    owners["data"] = trainer.datamodule
    owners |= {callback.state_key: callback for callback in trainer.callbacks}
    return {
        f"{name}.{key}": value
        for name, owner in owners.items()
        for key, value in vars(owner).items()
        if isinstance(value, GENERATORS)
    }


def random_state(gpus: list[torch.device]) -> dict[str, Any]:
    """Return the state of the global random generators of torch, of these GPUs, Python
    and numpy, in a form that safe loading accepts."""
    name, key, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus],
        "python": random.getstate(),
        # safe loading allows tensors, but no numpy arrays
        "numpy": [name, torch.tensor(np.asarray(key, dtype=np.int64)), *rest],
    }
    if torch.backends.mps.is_available():  # the GPU of an Apple computer
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any], gpus: list[torch.device]) -> None:
    """Set the global random generators to the result of `random_state`."""
    torch.set_rng_state(state["torch"])
    # the number of GPUs may have changed
    for gpu, gpu_state in zip(gpus, state["cuda"], strict=False):
        torch.cuda.set_rng_state(gpu_state, gpu)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))


def is_epoch_over(trainer: Trainer) -> bool:
    """Return whether the training has used all batches of this epoch."""
    num_batches = batch_index(trainer) + 1
    return num_batches >= trainer.num_training_batches or trainer.is_last_batch


def can_resume(trainer: Trainer) -> bool:
    """Return whether all training loaders can resume within an epoch."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return all(isinstance(x, ResumableLoader | StreamLoader) for x in loaders)


class WholeEpochs(Callback):
    """Corrects which epochs Lightning counts as complete.

    Lightning counts an epoch that max_steps or max_time cuts short, so a resume would
    leave out its rest. With max_steps, it takes the end of an epoch for the middle of
    the next one.
    """

    def on_save_checkpoint(
        self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Take an epoch that was cut short out of the counts."""
        epochs = saved_epochs(checkpoint)
        is_counted = epochs["current"]["processed"] == epochs["current"]["ready"]
        if is_counted and not is_epoch_over(trainer):
            for counts in epochs.values():
                counts["processed"] -= 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the next epoch if the checkpoint was written at the end of an epoch.
        Print a line if the loaders cannot resume. Raise UserError if no optimizer
        trains a parameter."""
        skip_ended_epoch(trainer)
        # if configure_optimizers returns None, Lightning's optimizer has one constant
        groups = [x for optimizer in trainer.optimizers for x in optimizer.param_groups]
        weights = [weight for group in groups for weight in group["params"]]
        trains = any(weight.requires_grad for weight in weights)
        if pl_module.automatic_optimization and not trains:
            raise UserError(
                f"{type(pl_module).__name__}.configure_optimizers returns no optimizer "
                "of a parameter that trains",
                status=2,
            )
        if not can_resume(trainer):
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            say(
                f"{type(data).__name__} has its own DataLoaders: a resume may end with "
                "other weights; several processes may count samples twice, and each "
                "trains on all of an IterableDataset"
            )


class PlateauFirst(Checkpoint):
    """Steps each ReduceLROnPlateau before the checkpoint of an epoch is written.
    Lightning steps it later, so a resume would lose the step.

    It is a Checkpoint because Lightning calls those after the module, which may log the
    watched value in `on_train_epoch_end`.
    """

    resumed: dict[str, Tensor] = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Step the schedules, unless the epoch was cut short."""
        if is_epoch_over(trainer):
            self.step_schedules()

    def on_save_checkpoint(
        self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Save the values that the schedules watch: a resume after their validation
        does not measure them again."""
        names = {config.monitor for config in trainer.lr_scheduler_configs}
        metrics = trainer.callback_metrics
        checkpoint["watched"] = {x: metrics[x] for x in metrics if x in names}

    def on_load_checkpoint(
        self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.resumed = checkpoint.get("watched", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step_schedules = take_over_plateau_schedules(trainer)
        trainer.callback_metrics.update(self.resumed)


class ResumedOptimizer(Callback):
    """Adapts the saved state of each optimizer to the optimizer of this run, and
    refuses the state of other optimizers or of another schedule.

    saved_numbers: The numbers of optimizers and of schedules in the checkpoint.
    """

    saved_numbers = (0, 0)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the optimizers for the saved states. Lightning restores the states
        after this hook.

        Raise UserError for another number of optimizers or schedules: Lightning would
        leave out those without a partner.
        """
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(adapt_state)
        if trainer.ckpt_path:
            numbers = len(trainer.optimizers), len(trainer.lr_scheduler_configs)
            if self.saved_numbers != numbers:
                problem = "there is another number of optimizers or schedules"
                raise UserError(problem, NEW_RUN)
            # `configure_optimizers` may have made the training loader already, with
            # `trainer.estimated_stepping_batches`. The epoch and the loader's state
            # were not restored then. Lightning now makes it again, and restores both.
            forget_train_loader(trainer)

    def on_save_checkpoint(
        self, _: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Save the options of the optimizer and the schedule, for `check_schedule`."""
        if has_named_optimizer(pl_module):
            checkpoint["schedule"] = schedule_options(pl_module)

    def on_load_checkpoint(
        self, trainer: Any, model: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Raise UserError if the code or the length of the training has changed, before
        Lightning restores the states."""
        if trainer.state.fn != "fit":
            return
        optimizers = checkpoint["optimizer_states"]
        schedules = checkpoint["lr_schedulers"]
        # the states of an optimizer have no names, but the positions of the parameters
        saved = checkpoint["state_dict"]
        names = dict(model.named_parameters())
        in_file = [name for name in saved if name in names]
        if in_file != [name for name in names if name in saved]:
            raise UserError(
                "the parameters have another order than in the checkpoint: the "
                "optimizer would mix up their states",
                "restore the order of the layers in the code, or start a new run "
                "without --ckpt_path and with --model.weights FILE",
            )
        self.saved_numbers = len(optimizers), len(schedules)
        if "schedule" in checkpoint and has_named_optimizer(model):
            # it may name a class of the user's package
            schedule = renamed(checkpoint["schedule"], checkpoint["package"])
            check_schedule(schedule, model)
            check_length(checkpoint, model)


def adapt_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Change a saved state, in place, so that it fits the optimizer of this run.

    Options such as `fused` keep the value of this run. The moments get the memory
    layout of the weights, on which a fused step relies.

    Raise UserError for the moments of another parameter.
    """
    # torch refuses another number of groups or parameters, after this hook
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=False)
    for group, saved_group in groups:
        for name in IMPLEMENTATIONS | {"name"}:
            if name in group or name in saved_group:
                saved_group[name] = group.get(name)
        pairs = zip(group["params"], saved_group["params"], strict=False)
        for weight, index in pairs:
            moments = saved["state"].get(index, {})
            for name, value in moments.items():
                if not isinstance(value, Tensor) or name == "step":
                    continue
                if value.shape == weight.shape:
                    moment = torch.empty_like(weight, dtype=value.dtype)
                    moments[name] = moment.copy_(value)
                elif type(optimizer) in FUSED_ON:
                    # their moments have the shape of the parameter. A fused step does
                    # not check it: it would read and write past a moment's end.
                    problem = f"{name} of the optimizer has another shape"
                    raise UserError(problem, NEW_RUN)


def check_schedule(saved: dict[str, Any], model: BaseModule) -> None:
    """Raise UserError if `schedule_options` has changed since the checkpoint, with the
    user's code. With other parameter groups, a fused step would read the state of
    another parameter, past its end."""
    options = schedule_options(model)
    for name, value in saved.items():
        if value != options.get(name):
            raise UserError(
                f"{type(model).__name__} has the {name} {options.get(name)}: a resume "
                f"keeps {value}; leave --ckpt_path out",
                status=2,
            )


def check_length(checkpoint: dict[str, Any], model: BaseModule) -> None:
    """Raise UserError if the saved schedule was made for another length of the
    training: the epochs so far would have had other rates."""
    name: Any = model.scheduler
    argument = name and length_argument(name, model.scheduler_args)
    if not argument:
        return
    (saved,) = checkpoint["lr_schedulers"]
    old_length = saved.get(argument)
    every = model.step_scheduler_every()
    length = schedule_length(model.trainer, every)
    if length != old_length:
        raise UserError(
            f"model.scheduler {name} is made for {old_length} {every}s, not {length}",
            "a new run can start with its weights: --model.weights FILE, without "
            "--ckpt_path",
            2,
        )


def schedule_options(model: BaseModule) -> dict[str, Any]:
    """Return the settings that determine the options of the parameter groups, in a form
    that safe loading accepts."""
    names = ["lr", "optimizer_args", "scheduler", "scheduler_args"]
    if model.parameter_groups:
        names.append("parameter_groups")
    options = as_plain({name: getattr(model, name) for name in names})
    return options | {"scheduler_interval": model.step_scheduler_every()}


def note_on_state(path: Path | None) -> str:
    """Return the note for errors of a training that continues from a checkpoint.

    path: The checkpoint, or None for a new training, which needs no note.
    """
    if path is None:
        return ""
    return (
        f"the state in {path} may not fit the code of today; a new run can begin with "
        f"its weights: --model.weights {path}"
    )
