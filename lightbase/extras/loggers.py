"""The loggers of a run's curves: TensorBoard, or the loggers of --trainer.logger.

`open_loggers` makes them, with arguments that follow from the folder of the run.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.loggers import (
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from lightbase.core.build import as_list, instantiate
from lightbase.core.errors import UserError, first_line
from lightbase.core.folder import Run
from lightbase.core.project import PROJECT
from lightbase.core.spec import RunSpec, arguments, entries

TENSORBOARD = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger")
"""The logger of a run whose config names none."""


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard's logger with other names for some curves: lr and epoch are in the
    group watch/, the test metrics in view/. TensorBoard sorts groups by name and opens
    the first ones, which are then train/ and val/."""

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None
    ) -> None:
        """Write one point for each metric. The number of test samples is left out: it
        is no curve."""
        tags = {}
        for name, value in metrics.items():
            tag = re.sub(r"^(epoch$|lr\b)", r"watch/\1", name)
            tags[re.sub(r"^test(?=[/_])", "view/test", tag)] = value
        tags.pop("view/test/num_samples", None)
        super().log_metrics(tags, step)


@contextmanager
def open_loggers(spec: RunSpec, root: Path, run: Run | None) -> Iterator[list[Logger]]:
    """Within this context, the loggers of a run are open. At its end, the run at W&B
    ends, with status 1 after an error. Otherwise the next run of the same process would
    continue it.

    The arguments and the errors are those of `make_loggers`.
    """
    loggers = make_loggers(spec, root, run)
    status = 1
    try:
        yield loggers
        status = 0
    finally:
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish(status)


def make_loggers(spec: RunSpec, root: Path, run: Run | None) -> list[Logger]:
    """Build the loggers that trainer.logger names. Without this setting, the logger is
    TensorBoard's. With false or an empty list there is none.

    root: The folder of all runs.
    run: The run's folder, or None in a process that writes nothing.
    Raises UserError if a logger cannot start, for instance because its package is not
    installed, or its server does not answer.
    """
    setting = spec.config.trainer.logger
    if setting in (False, []):
        return []
    if run is None:
        return [RunTensorBoard(root, version="")]  # writes nothing
    if spec.trainer["logger"]:  # an object, see lightbase.train
        return as_list(spec.trainer["logger"])
    configs = [x for x in as_list(setting) if isinstance(x, Namespace)]
    return [make_logger(spec, config, run) for config in configs or [TENSORBOARD]]


def make_logger(spec: RunSpec, config: Namespace, run: Run) -> Logger:
    """Build a logger. Arguments that the config leaves out follow from the run.

    TensorBoard and CSV files are written into the folder of the run. W&B writes there,
    too. MLflow keeps all runs in mlruns/ in the folder of all runs.

    config: It has a class_path, and maybe init_args and dict_kwargs.
    Raises UserError if the logger cannot start. Any error counts, because each package
    has its own classes of errors.
    """
    name = config.class_path.rpartition(".")[2]
    title = spec.config.name
    folder = str(run.folder)
    version = run.folder.name
    number: int | str = version
    if re.fullmatch(r"version_\d+", version):  # the folder may be renamed
        number = int(version.removeprefix("version_"))  # bars cut a text
    defaults: dict[str, dict[str, Any]] = {
        "TensorBoardLogger": {
            "save_dir": run.folder.parents[1],
            "name": run.folder.parent.name,
            "version": number,
            "default_hp_metric": False,
        },
        # Lightning's writer deletes an earlier metrics.csv: it counts versions of its
        # folder
        "CSVLogger": {"save_dir": folder, "name": "csv"},
        "WandbLogger": {
            "save_dir": folder,
            "name": f"{title}/{version}",
            "project": os.environ.get("WANDB_PROJECT", PROJECT.package),
        },
        "MLFlowLogger": {
            "save_dir": str(run.root / "mlruns"),
            "experiment_name": title,
            "run_name": version,
        },
    }
    options = defaults.get(name, {})
    given = arguments(config) | entries(config.get("dict_kwargs"))
    options |= {key: value for key, value in given.items() if value is not None}
    # MLflow 3 needs it where the runs are in a folder
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        if config.class_path == TENSORBOARD.class_path:
            return RunTensorBoard(**options)
        config = Namespace(class_path=config.class_path, init_args=Namespace(options))
        settings = Namespace(trainer=Namespace(logger=config))
        logger: Logger = instantiate(spec, settings).trainer.logger
        if isinstance(logger, WandbLogger | MLFlowLogger):
            _ = logger.experiment  # starts the run at the server
        return logger
    except Exception as error:
        raise UserError(f"{name} cannot start: {first_line(error)}") from error
