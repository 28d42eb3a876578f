"""The loggers of a run's curves: TensorBoard, or the loggers of --trainer.logger, with
arguments that follow from the folder of the run.
"""

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from jsonargparse import Namespace
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import (
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard.summary import hparams

from lightbase.compat import saved_logged_step
from lightbase.config.errors import UserError, first_line, imported, say
from lightbase.config.files import Values, relative_to_cwd
from lightbase.config.paths import PROJECT
from lightbase.config.spec import RunSpec, arguments, as_list, entries
from lightbase.config.yaml_files import WITHOUT_EFFECT, flatten
from lightbase.model.curves import run_folder
from lightbase.run.folder import LockedFolder, root_folder
from lightbase.watch.log import LogFile

TENSORBOARD = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger")
"""The logger of a run whose config names none."""


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard's logger with other names for some curves: lr and epoch are in the
    group watch/, the test metrics in view/. TensorBoard sorts groups by name and opens
    the first ones, which are then train/ and val/."""

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None
    ) -> None:
        tags = {}
        for name, value in metrics.items():
            tag = re.sub(r"^(epoch$|lr\b)", r"watch/\1", name)
            tags[re.sub(r"^test(?=[/_])(?!_each_epoch)", "view/test", tag)] = value
        tags.pop("view/test/num_samples", None)  # no curve
        super().log_metrics(tags, step)


@contextlib.contextmanager
def open_loggers(
    log: LogFile, spec: RunSpec, run: LockedFolder | None
) -> Iterator[list[Logger]]:
    """Within this context, the loggers of a run are open. log.txt begins. At the end,
    the run at W&B ends, with status 1 after an error. Otherwise the next run of the
    same process would continue it."""
    log.begin(run)
    loggers = make_loggers(spec, run)
    status = 1
    try:
        yield loggers
        status = 0
    finally:
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish(status)


class LoggedSettings(Callback):
    """Writes the hyperparameters into the loggers when a training starts, and the
    points of the curves to disk before each checkpoint.

    config: The config of the run, as plain values.
    continues: Whether the run continues in its folder.
    first_step: The step at which this start begins its curves.
    """

    first_step = 0

    def __init__(self, config: Values, continues: bool) -> None:
        self.parameters = hyper_parameters(config)
        self.continues = continues

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Values
    ) -> None:
        """Find the step at which a run that continues in its folder starts again."""
        if self.continues:
            # not its global_step, which counts each of several optimizers
            self.first_step = saved_logged_step(checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        # Lightning would keep the file of an earlier start
        (run_folder(trainer) / "hparams.yaml").unlink(missing_ok=True)
        for logger in trainer.loggers:
            logger.log_hyperparams(self.parameters)
            if isinstance(logger, TensorBoardLogger):
                writer = logger.experiment.file_writer
                # TensorBoard drops the points from this step on that an earlier start
                # has written. It ignores the first such event of a run.
                start = SessionLog(status=SessionLog.START)
                writer.add_event(Event(step=self.first_step, session_log=start))
                # The first summary would list columns. TensorBoard takes the parameters
                # that differ first.
                for summary in hparams(self.parameters, {})[1:]:
                    writer.add_summary(summary)
                folder = shlex.quote(relative_to_cwd(Path(logger.save_dir)))
                say(f"Curves: tensorboard --logdir {folder}")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Values
    ) -> None:
        """Write the points of the curves to disk. If the run is killed after the
        checkpoint, its curves have all points up to it: a resume leaves no gap."""
        for logger in trainer.loggers:
            logger.save()


def make_loggers(spec: RunSpec, run: LockedFolder | None) -> list[Logger]:
    """Build the loggers that trainer.logger names, by default TensorBoard's, with false
    or an empty list none. run: None in a process that writes nothing."""
    setting = spec.config.trainer.logger
    if setting in (False, []):
        return []
    if run is None:
        return [RunTensorBoard(root_folder(spec.config), version="")]  # writes nothing
    if spec.trainer["logger"]:  # an object, see lightbase.train
        return as_list(spec.trainer["logger"])
    configs = [x for x in as_list(setting) if isinstance(x, Namespace)]
    return [make_logger(spec, config, run) for config in configs or [TENSORBOARD]]


def make_logger(spec: RunSpec, config: Namespace, run: LockedFolder) -> Logger:
    """Build a logger. Arguments that the config leaves out follow from the run.

    config: It has a class_path, and maybe init_args and dict_kwargs.
    """
    name = config.class_path.rpartition(".")[2]
    title = spec.config.name
    version = run.folder.name
    defaults: dict[str, Values] = {
        "TensorBoardLogger": {
            "save_dir": run.folder.parents[1],
            "name": run.folder.parent.name,
            "version": version,
            "default_hp_metric": False,
        },
        # Lightning's writer deletes an earlier metrics.csv: it counts versions of its
        # folder
        "CSVLogger": {"save_dir": run.folder, "name": "csv"},
        "WandbLogger": {
            "save_dir": run.folder,
            "name": f"{title}/{version}",
            "project": os.environ.get("WANDB_PROJECT", PROJECT.package),
        },
        "MLFlowLogger": {
            "save_dir": run.root / "mlruns",
            "experiment_name": title,
            "run_name": version,
        },
    }
    options = defaults.get(name, {})
    given = arguments(config) | entries(config.get("dict_kwargs"))
    options |= {key: value for key, value in given.items() if value is not None}
    if name == "MLFlowLogger":  # MLflow 3 needs it where the runs are in a folder
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        if config.class_path == TENSORBOARD.class_path:
            return RunTensorBoard(**options)
        logger: Logger = imported("trainer.logger", config.class_path, Logger)(
            **options
        )
        if isinstance(logger, WandbLogger | MLFlowLogger):
            _ = logger.experiment  # starts the run at the server
        return logger
    except Exception as error:
        raise UserError(f"{name} cannot start: {first_line(error)}") from error


def hyper_parameters(config: Values) -> Values:
    """Return the settings in which experiments differ, such as {"model.lr": 0.01,
    "model.net": "my.models.mlp.MLP"}. The values are bool, int, float or text. Settings
    that are None, or that do not change the training, are left out.

    config: The config of a run, as plain values.
    """
    names = ("max_epochs", "precision", "accumulate_grad_batches", "gradient_clip_val")
    trainer = {name: config["trainer"][name] for name in names}
    parts = {"model": config["model"], "data": config["data"], "trainer": trainer}
    parameters: Values = {"seed": config["seed_everything"]}
    for key, value in flatten(parts).items():
        if value is None or key.rpartition(".")[2] in WITHOUT_EFFECT:
            continue
        if not isinstance(value, int | float | str):
            value = str(value)
        # MLflow refuses model.parameter_groups.*.bias.lr
        parameters[re.sub(r"[^\w/. -]", "_", key)] = value
    return parameters
