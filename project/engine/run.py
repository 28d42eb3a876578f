"""A training run from its command line to its test result."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.random_state import RandomState
from project.base.rank import rank, say
from project.base.system import System
from project.callbacks.device_monitor import DeviceMonitor
from project.callbacks.prediction_figures import PredictionFigures
from project.callbacks.progress import Patience
from project.callbacks.step_timer import StepTimer
from project.engine.advice import advice, facts
from project.engine.checkpoints import AtomicCheckpointIO, RunCheckpoint, read_checkpoint
from project.engine.checks import try_network
from project.engine.cli import TrainingCLI
from project.engine.devices import cpu_threads, describe_devices
from project.engine.folder import LOGS, Run, find_checkpoint, folder_to_continue
from project.engine.parser import arguments
from project.engine.processes import StopOnSigterm, end_with_parent, is_child, leave, short_process_errors
from project.engine.quiet import quiet_lightning
from project.engine.recorder import RunRecorder
from project.engine.resume import StretchSchedule, check_resume, schedule_at
from project.engine.script import short_errors
from project.engine.selection import Selection, choose_selection
from project.engine.steps import SeveralSteps, obstacle

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "default.yaml"


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as `args`, or the command line, say; test the best checkpoint. Returns what metrics.json holds.

    A user's mistake prints two lines and raises SystemExit with status 2 (usage) or 1 (run).
    """
    with short_errors():
        end_with_parent()
        quiet_lightning()
        args = list(sys.argv[1:] if args is None else args)
        cli = parse(args)
        if not has_config(args):
            say(
                "No --config given: a CIFAR-10 shaped network trains on images that the template makes itself.\n"
                "On real data: python scripts/train.py --config configs/cifar10_cnn.yaml (or mnist_mlp.yaml)"
            )
        with cpu_threads(cli.config.num_threads):
            return train(cli)


def has_config(args: Sequence[str]) -> bool:
    return any(arg.partition("=")[0] in ("--config", "-c") for arg in args)


def parse(args: Sequence[str]) -> TrainingCLI:
    """Model and data of a command line; of the default experiment where it names no config."""
    return TrainingCLI(arguments(args if has_config(args) else ["--config", str(DEFAULT_CONFIG), *args]))


def root_folder(config: Any) -> Path:
    """Where runs are kept, below which `name` is to be a folder."""
    root = Path(config.trainer.default_root_dir or LOGS)
    if not config.name or Path(config.name).is_absolute() or ".." in Path(config.name).parts:
        raise UserError(f"--name {config.name!r} is no name for a folder below {root}", 2)
    return root


def train(cli: TrainingCLI) -> dict[str, Any]:
    config = cli.config
    root = root_folder(config)
    cli.check_devices()
    checkpoint, checkpoint_path = None, None
    if config.ckpt_path is not None:
        checkpoint_path = find_checkpoint(config.ckpt_path, root, config.name)
        checkpoint = read_checkpoint(checkpoint_path)
        check_resume(checkpoint, cli.model, config.trainer.max_epochs, checkpoint_path)
    if rank() == 0:
        prepare(cli)
    selection = choose_selection(config, cli.model, cli.datamodule)

    if config.trainer.fast_dev_run:
        callbacks = [StopOnSigterm(), StretchSchedule(), RunRecorder(*cli.plain_config())]
        trainer = cli.make_trainer(callbacks=callbacks, plugins=[AtomicCheckpointIO()])
        with short_process_errors():
            return fit_and_test(trainer, cli, checkpoint_path, None)
    run = None
    if rank() == 0:  # the others write nothing
        run = Run(root, config.name, checkpoint_path and folder_to_continue(checkpoint_path, root, config.name))
    try:
        trainer = cli.make_trainer(
            logger=make_logger(cli.config_init.trainer.logger, root, run, checkpoint),
            callbacks=make_callbacks(cli, root, run, selection),
            plugins=[AtomicCheckpointIO()],
        )
        with short_process_errors():
            return fit_and_test(trainer, cli, checkpoint_path, run)
    except (UserError, OSError):
        if run and run.is_new and not list(run.checkpoints.glob("*.ckpt")):
            run.discard()
        raise
    finally:
        if run:
            run.close()


def prepare(cli: TrainingCLI) -> None:
    """Load the data and try the network on it, before a run folder exists."""
    config, data = cli.config, cli.datamodule
    if isinstance(data, TensorDataModule):  # others may need the Trainer for it
        data.prepare_data()
        data.setup("fit")
        train, val = data.splits["train"], data.splits.get("val", ())
        classes = f" of {data.num_classes} classes" if data.num_classes else ""
        say(
            f"Data: {type(data).__name__}, {len(train):,} training and {len(val):,} validation samples{classes}, "
            f"batch size {data.batch_size}"
        )
        if config.try_network:
            try_network(cli.model, data, config.trainer)
    if isinstance(cli.model, System) and isinstance(cli.model.optimizer, str):
        schedule_at(3, cli.model, num_steps=100)  # a wrong argument is found before anything is written


def make_logger(flag: Any, root: Path, run: Run | None, checkpoint: dict[str, Any] | None) -> Any:
    """TensorBoard into the run's folder, unless the config says otherwise."""
    if flag not in (None, True):
        return flag
    if run is None:
        return TensorBoardLogger(root, version="")  # writes nothing
    # a resumed run writes its curves on from the checkpoint's step
    purge_step = None if run.is_new or checkpoint is None else checkpoint["global_step"]
    folder = run.folder
    return TensorBoardLogger(
        folder.parents[1], folder.parent.name, folder.name, default_hp_metric=False, purge_step=purge_step
    )


def make_callbacks(cli: TrainingCLI, root: Path, run: Run | None, selection: Selection | None) -> list[Callback]:
    config = cli.config
    monitor, mode, or_last = selection or (None, "min", False)
    folder = run.checkpoints if run else root  # Lightning gives all processes the first one's
    callbacks: list[Callback] = [
        StretchSchedule(),
        RandomState(),
        StopOnSigterm(),
        *make_watchers(cli),
        RunRecorder(*cli.plain_config(), run, None if or_last else monitor),
    ]
    if config.patience is not None:
        callbacks.append(Patience(monitor or "", patience=int(config.patience), mode=mode))
    if config.trainer.enable_checkpointing is not False:
        # the best one first: the last one then knows of it
        in_epoch = config.trainer.val_check_interval not in (None, 1.0) or not config.trainer.check_val_every_n_epoch
        every = None if in_epoch else config.trainer.check_val_every_n_epoch
        every = every if selection else 1  # the last epoch
        callbacks.append(RunCheckpoint(folder, "best", monitor, mode, or_last, every_n_epochs=every))
        if config.keep_every_epoch:
            callbacks.append(RunCheckpoint(folder, "epoch_{epoch:03d}", keep_all=True))
        callbacks.append(RunCheckpoint(folder, "last"))
    return callbacks


def make_watchers(cli: TrainingCLI) -> list[Callback]:
    """Callbacks that show what happens and change nothing."""
    config = cli.config
    every = config.figures_every_n_epochs
    watchers: list[Callback] = [PredictionFigures(every)] if every else []
    if config.step_timer:
        watchers.append(StepTimer(every))
    if config.device_monitor:
        watchers.append(DeviceMonitor())
    return watchers


def fit_and_test(trainer: Trainer, cli: TrainingCLI, checkpoint_path: Path | None, run: Run | None) -> dict[str, Any]:
    model, data = cli.model, cli.datamodule
    say(describe_devices(trainer))
    if run and isinstance(trainer.logger, TensorBoardLogger):
        say(f"Curves: tensorboard --logdir {short(run.folder.parents[1])}")
    recorder = next(callback for callback in trainer.callbacks if isinstance(callback, RunRecorder))  # type: ignore[attr-defined]
    if str(cli.config.trainer.strategy).startswith(("ddp_spawn", "ddp_fork", "ddp_notebook")):
        recorder.result.share_memory_()  # the training happens in other processes
    try:
        trainer.fit(model, data, ckpt_path=checkpoint_path, weights_only=True)
        epochs, steps, seconds = recorder.result.tolist()
        values = {"epochs": int(epochs), "steps": int(steps), "train_seconds": round(seconds, 3)}
        tested = best_checkpoint(trainer)
        results = []
        if is_overridden("test_step", model) and is_overridden("test_dataloader", data):
            results = trainer.test(model, data, ckpt_path=tested, verbose=False, weights_only=True)
    except ValueError as error:
        if "`val_check_interval`" not in str(error):
            raise
        raise UserError(first_line(error), 2) from error
    except MisconfigurationException as error:
        raise UserError(first_line(error)) from error
    except SIGTERMException:  # Lightning would exit with status 0 (its issue 21623)
        if rank() == 0:
            print("Stopped by SIGTERM; go on with --ckpt_path last", file=sys.stderr)
        leave(trainer)
        # Lightning kills the whole run if a process that it has started fails
        sys.exit(0 if is_child(trainer) else 128 + signal.SIGTERM)
    found: dict[str, Any] = dict(results[0]) if results else {}
    if "test/num_samples" in found:
        found["test/num_samples"] = int(found["test/num_samples"])
    values = found | values
    if run:
        run.write_metrics(values)
    leave(trainer)
    what = f"the best checkpoint {short(tested)}" if tested else "the last weights"
    numbers = ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )
    say(f"Trained {values['epochs']} epochs, {values['steps']} steps in {values['train_seconds']:.1f} s")
    say(f"Test of {what}: {numbers}" if found else "No test: the model or the data has none, or no batch of it")
    say(f"Run folder: {short(run.folder)}" if run else "fast_dev_run: one batch of each, nothing written")
    for sentence in advise(trainer, cli):
        say(f"Advice: {sentence}")
    return values


def advise(trainer: Any, cli: TrainingCLI) -> list[str]:
    timer = next((callback for callback in trainer.callbacks if isinstance(callback, StepTimer)), None)
    monitor = next((callback for callback in trainer.callbacks if isinstance(callback, DeviceMonitor)), None)
    if timer is None:
        return []
    several = trainer.strategy.num_steps if isinstance(trainer.strategy, SeveralSteps) else 1
    can_be_several = type(trainer.strategy) is SingleDeviceStrategy and obstacle(trainer) is None
    found = facts(trainer, timer, monitor, several, can_be_several)
    return advice(found) if found else []


def best_checkpoint(trainer: Trainer) -> Path | None:
    """best.ckpt of the first process, if it has written one."""
    own = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, RunCheckpoint)]
    path = Path(own[0].own_folder, "best.ckpt") if own else None
    is_there: bool = trainer.strategy.broadcast(path is not None and path.is_file())
    if is_there and path and not path.is_file():
        raise UserError(f"{path} is not to be seen from here: the machines of a run must share its folder")
    return path if is_there else None


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].strip()


def short(path: Path | None) -> str:
    """The path as the user would type it: relative to the working folder if it lies below that."""
    assert path is not None
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
