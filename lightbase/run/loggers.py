"""Lightning's loggers, so that a resumed run continues its curves.

TensorBoard and metrics.csv drop the points after the checkpoint, which are written again. W&B and
MLflow cannot delete points: the same run there gets them a second time, with the same values.
"""

import csv
import io
import json
import os
import re
import time
from collections import Counter
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
from lightbase.folder import PROJECT, Run, json_text, short, write_whole


class RunTensorBoard(TensorBoardLogger):
    """first_step: the first step of this start of the run."""

    first_step = 0

    def drop_later_points(self) -> None:
        """Tell TensorBoard to drop the points from `first_step` on that are there now. It ignores
        the first such event of a run, so a new run needs one, too."""
        start = SessionLog(status=SessionLog.START)
        event = Event(step=self.first_step, session_log=start)
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
        self.read()

    def read(self) -> list[dict[str, str]]:
        """Return the rows of the file, without a last row that a kill has cut short."""
        if not self.path.is_file():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values()]
        self.columns = list(reader.fieldnames or [])
        return rows

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the whole file; a kill leaves the earlier one."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.path, text.getvalue())

    def drop_rows(self, first_step: int) -> None:
        if self.path.is_file():
            self.write([row for row in self.read() if int(row["step"]) < first_step])

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in metrics.items()
        }
        self.metrics.append(numbers | {"step": step})

    def log_hparams(self, params: dict[str, Any]) -> None:
        save_hparams_to_yaml(self.folder / "hparams.yaml", params)

    def save(self) -> None:
        columns = sorted({*self.columns}.union(*self.metrics))
        if columns != self.columns:
            rows = self.read()
            self.columns = columns
            self.write([*rows, *self.metrics])
        elif self.metrics:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns).writerows(self.metrics)
        self.metrics = []


class RunCSV(CSVLogger):
    """first_step: the first step of this start of the run."""

    first_step = 0
    file: MetricsFile | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self.file is None:
            self.file = MetricsFile(Path(self.log_dir))
        return self.file

    def drop_later_points(self) -> None:
        self.experiment.drop_rows(self.first_step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.file is not None:
            self.file.save()


class RunMLFlow(MLFlowLogger):
    """MLflow's parameters never change: a resumed run keeps those of its first start."""

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        if not self.experiment.get_run(self.run_id).data.params:
            # MLflow refuses a name such as model.parameter_groups.*.bias.lr
            names = {name: re.sub(r"[^\w/. -]", "_", name) for name in params}
            super().log_hyperparams({names[name]: params[name] for name in params})


OURS: dict[str, type[Logger]] = {
    "lightning.pytorch.loggers.TensorBoardLogger": RunTensorBoard,
    "lightning.pytorch.loggers.CSVLogger": RunCSV,
    "lightning.pytorch.loggers.WandbLogger": WandbLogger,
    "lightning.pytorch.loggers.MLFlowLogger": RunMLFlow,
}
DEFAULT = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=Namespace())


def make_loggers(
    cli: TrainingCLI, root: Path, run: Run | None, checkpoint: dict[str, Any] | None
) -> list[Logger] | Literal[False]:
    """Build the loggers of trainer.logger; TensorBoard's without one.

    run: None in a fast_dev_run, and in all processes but the first. checkpoint: the one that the
    run continues from. Raises UserError if a logger cannot start, for instance without its server.
    """
    if cli.config.trainer.logger in (False, []):
        return False
    if run is None:
        return [RunTensorBoard(root, version="")]  # writes nothing
    is_resumed = checkpoint is not None and not run.is_new
    first_step = checkpoint["global_step"] if checkpoint is not None and is_resumed else 0
    if is_resumed:
        put_event_files_first(run.folder)
    loggers, counts = [], Counter[str]()
    for config in configs_of_loggers(cli.config.trainer.logger) or [DEFAULT]:
        name = config.class_path.rpartition(".")[2]
        counts[name] += 1
        id_file = run.folder / f".{name}{counts[name]}.json"
        run_id = None
        if is_resumed and id_file.is_file():
            run_id = json.loads(id_file.read_text(encoding="utf-8"))["id"]
        try:
            logger = make_logger(cli, config, run, run_id)
            if isinstance(logger, WandbLogger | MLFlowLogger):
                _ = logger.experiment  # starts the run there, or continues it
                run.write(id_file.name, json_text({"id": logger.version}))
        except Exception as error:  # each package and each server has errors of its own
            raise UserError(f"{name} cannot start: {first_line(error)}") from error
        if isinstance(logger, RunTensorBoard | RunCSV):
            logger.first_step = first_step
        loggers.append(logger)
    return loggers


def put_event_files_first(folder: Path) -> None:
    """Let TensorBoard, which sorts event files by the time in their names, read those of earlier
    starts first, even if the clock has been set back."""
    files = [(file, file.name.split(".", 4)) for file in folder.glob("events.out.tfevents.*")]
    ahead = max((int(parts[3]) for _, parts in files), default=0) - int(time.time())
    for file, (*kind, seconds, rest) in files if ahead >= 0 else []:
        file.rename(folder / ".".join([*kind, f"{int(seconds) - ahead - 1:010d}", rest]))


def make_logger(cli: TrainingCLI, config: Any, run: Run, run_id: str | None) -> Logger:
    """Build a logger. Its arguments that the config leaves out follow from the run.

    run_id: the id of the run at W&B or MLflow that is continued.
    """
    name = config.class_path.rpartition(".")[2]
    arguments = default_arguments(str(cli.config.name), run, run_id).get(name, {})
    for given in (config.get("init_args"), config.get("dict_kwargs")):
        arguments |= {
            key: value for key, value in vars(given or Namespace()).items() if value is not None
        }
    uri = str(arguments.get("tracking_uri", ""))
    if name == "MLFlowLogger" and ("://" not in uri or uri.startswith("file:")):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 needs it for a folder
    if config.class_path in OURS:
        return OURS[config.class_path](**arguments)
    config = Namespace(class_path=config.class_path, init_args=Namespace(arguments))
    logger: Logger = cli.instantiate(Namespace(trainer=Namespace(logger=config))).trainer.logger
    return logger


def default_arguments(title: str, run: Run, run_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the arguments by the logger's class. title: the run's name, without its version."""
    version = run.folder.name
    place = {"save_dir": run.folder.parents[1], "name": run.folder.parts[-2], "version": version}
    return {
        "TensorBoardLogger": {**place, "default_hp_metric": False},
        "CSVLogger": place,
        "WandbLogger": {
            "save_dir": str(run.folder),
            "name": f"{title}/{version}",
            "project": os.environ.get("WANDB_PROJECT", PROJECT.package),
            "id": run_id,
        },
        "MLFlowLogger": {
            "save_dir": str(run.root / "mlruns"),
            "experiment_name": title,
            "run_name": version,
            "run_id": run_id,
        },
    }


def places_of_curves(loggers: Sequence[Logger]) -> Iterator[str]:
    """Yield where to look at the curves. W&B prints it itself."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            yield f"tensorboard --logdir {short(Path(logger.save_dir))}"
        elif isinstance(logger, CSVLogger):
            yield short(Path(logger.log_dir, "metrics.csv"))
        elif isinstance(logger, MLFlowLogger) and logger.save_dir:
            folder = short(Path(logger.save_dir))
            yield f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}"


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
