"""Lightning's loggers with places in the run's folder. TensorBoard and metrics.csv continue in a
resumed run: the points after the checkpoint, which are written again, are dropped first."""

import csv
import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch import Tensor

from lightbase.cli.config import configs_of_loggers
from lightbase.cli.training_cli import TrainingCLI
from lightbase.errors import UserError, first_line
from lightbase.folder import PROJECT, Run, write_whole


class RunTensorBoard(TensorBoardLogger):
    def drop_points_from(self, step: int) -> None:
        """Tell TensorBoard to drop the points from a step on that are there now. It ignores the
        first such event of a run, so a new run needs one, too."""
        event = Event(step=step, session_log=SessionLog(status=SessionLog.START))
        self.experiment.file_writer.add_event(event)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        # TensorBoard sorts by name: Lightning's `epoch` would come before loss and accuracy
        names = {"epoch": "watch/epoch"}
        super().log_metrics({names.get(name, name): metrics[name] for name in metrics}, step)


class MetricsFile:
    """Writes metrics.csv and hparams.yaml for CSVLogger. Lightning's writer deletes an earlier
    metrics.csv, and a kill can destroy the file while it gets a new column."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "metrics.csv"
        self.metrics: list[dict[str, Any]] = []  # not in the file yet
        self.columns: list[str] = []

    def read(self) -> list[dict[str, str]]:
        """Return the rows of the file, without a last row that a kill has cut short."""
        if not self.path.is_file():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if None not in row.values()]

    def rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the whole file; a kill leaves the earlier one."""
        self.columns = sorted({name for row in rows for name in row})
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.path, text.getvalue())

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in metrics.items()
        }
        self.metrics.append(numbers | {"step": step})

    def log_hparams(self, params: dict[str, Any]) -> None:
        save_hparams_to_yaml(self.folder / "hparams.yaml", params)

    def save(self) -> None:
        if {name for row in self.metrics for name in row} - {*self.columns}:
            self.rewrite([*self.read(), *self.metrics])
        else:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns).writerows(self.metrics)
        self.metrics = []


class RunCSV(CSVLogger):
    file: MetricsFile | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self.file is None:
            self.file = MetricsFile(Path(self.log_dir))
        return self.file

    def drop_points_from(self, step: int) -> None:
        rows = self.experiment.read()
        self.experiment.rewrite([row for row in rows if int(row["step"]) < step])

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.file is not None:
            self.file.save()


OURS: dict[str, type[Logger]] = {
    "lightning.pytorch.loggers.TensorBoardLogger": RunTensorBoard,
    "lightning.pytorch.loggers.CSVLogger": RunCSV,
}
DEFAULT = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=Namespace())


def make_loggers(cli: TrainingCLI, root: Path, run: Run | None) -> list[Logger] | Literal[False]:
    """Build the loggers of trainer.logger; TensorBoard's without one.

    run: None in a fast_dev_run, and in all processes but the first. Raises UserError if a logger
    cannot start, for instance without its package or its server.
    """
    if cli.config.trainer.logger in (False, []):
        return False
    if run is None:
        return [RunTensorBoard(root, version="")]  # writes nothing
    if not run.is_new:
        put_event_files_first(run.folder)
    configs = configs_of_loggers(cli.config.trainer.logger) or [DEFAULT]
    return [make_logger(cli, config, run) for config in configs]


def put_event_files_first(folder: Path) -> None:
    """Let TensorBoard, which sorts event files by the time in their names, read those of earlier
    starts first, even if the clock has been set back."""
    files = [(file, file.name.split(".", 4)) for file in folder.glob("events.out.tfevents.*")]
    ahead = max((int(parts[3]) for _, parts in files), default=0) - int(time.time())
    for file, (*kind, seconds, rest) in files if ahead >= 0 else []:
        file.rename(folder / ".".join([*kind, f"{int(seconds) - ahead - 1:010d}", rest]))


def make_logger(cli: TrainingCLI, config: Any, run: Run) -> Logger:
    """Build a logger. Its arguments that the config leaves out follow from the run."""
    name = config.class_path.rpartition(".")[2]
    arguments = default_arguments(str(cli.config.name), run).get(name, {})
    for given in (config.get("init_args"), config.get("dict_kwargs")):
        values = vars(given or Namespace())
        arguments |= {key: value for key, value in values.items() if value is not None}
    # MLflow 3 needs it where the runs are in a folder
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        if config.class_path in OURS:
            return OURS[config.class_path](**arguments)
        config = Namespace(class_path=config.class_path, init_args=Namespace(arguments))
        logger: Logger = cli.instantiate(Namespace(trainer=Namespace(logger=config))).trainer.logger
        if isinstance(logger, WandbLogger | MLFlowLogger):
            _ = logger.experiment  # starts the run at the server
        return logger
    except Exception as error:  # each package has errors of its own
        raise UserError(f"{name} cannot start: {first_line(error)}") from error


def default_arguments(title: str, run: Run) -> dict[str, dict[str, Any]]:
    """Return the arguments by the logger's class. title: the run's name, without its version."""
    version = run.folder.name
    # Lightning's bars show a number, but the last four letters of a text
    number = version.removeprefix("version_")
    place: dict[str, Any] = {"save_dir": run.folder.parents[1], "name": run.folder.parts[-2]}
    place["version"] = int(number) if number.isdecimal() else version
    project = os.environ.get("WANDB_PROJECT", PROJECT.package)
    return {
        "TensorBoardLogger": {**place, "default_hp_metric": False},
        "CSVLogger": place,
        "WandbLogger": {
            "save_dir": str(run.folder),
            "name": f"{title}/{version}",
            "project": project,
        },
        "MLFlowLogger": {
            "save_dir": str(run.root / "mlruns"),
            "experiment_name": title,
            "run_name": version,
        },
    }


@contextmanager
def ended(loggers: list[Logger] | Literal[False]) -> Iterator[None]:
    """End the run at W&B when ours ends: the next run of this process would continue it."""
    status = 1
    try:
        yield
        status = 0
    finally:
        for logger in loggers or []:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish(status)
