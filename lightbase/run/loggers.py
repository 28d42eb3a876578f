"""Lightning's loggers, going on where a resumed run goes on: no point twice, and none of before
lost."""

import csv
import importlib.util
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lightbase.cli.parser import configs_of_loggers
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import KeepingWriter, drop_anonymous, hide_no_points
from lightbase.errors import UserError, first_line
from lightbase.folder import PROJECT, Run, json_text, short, write_whole


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard sorts by name: `epoch`, which Lightning adds, goes behind loss and accuracy, as
    all of watch/."""

    def keep_points(self) -> None:
        hide_no_points(self)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(
            {"watch/epoch" if name == "epoch" else name: metrics[name] for name in metrics}, step
        )


class RunRows(CSVLogger):
    """Keeps what metrics.csv has of the steps before `purge_step`, where Lightning deletes the
    file."""

    purge_step: float = 0
    rows: Any = None  # once it is written to

    def keep_points(self) -> None:
        self.purge_step = math.inf

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self.rows is None:
            self.rows = Rows(self.log_dir, self.purge_step)
        return self.rows

    def finalize(self, status: str) -> None:
        if self.rows is not None:
            self.save()


class Rows(KeepingWriter):
    def __init__(self, log_dir: str, purge_step: float) -> None:
        super().__init__(log_dir)
        file = Path(self.metrics_file_path)
        if file.is_file():
            with file.open(newline="", encoding="utf-8") as lines:
                reader = csv.DictReader(lines)
                # a row that was cut short lacks values
                rows = [
                    row
                    for row in reader
                    if None not in row.values() and int(row["step"]) < purge_step
                ]
                self.metrics_keys = list(reader.fieldnames or [])
            self._write(rows)

    def rewrite(self) -> None:
        with Path(self.metrics_file_path).open(newline="", encoding="utf-8") as lines:
            self._write(list(csv.DictReader(lines)))

    def _write(self, rows: Sequence[Mapping[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(Path(self.metrics_file_path), text.getvalue())


class GoesOn(Logger):
    """A logger whose points cannot be taken back: a resumed run leaves out those that it had
    written already.

    file: with the id of the run there, and the newest step of each curve.
    """

    file: Path
    told: dict[str, int]
    before: dict[str, int]

    def begin(self, file: Path, saved: dict[str, Any]) -> None:
        self.file, self.before = file, saved.get("told", {})
        self.told = dict(self.before)
        _ = self.experiment  # type: ignore[attr-defined]  # makes the run there
        self._save()

    def _save(self) -> None:
        staged = self.file.with_suffix(
            ".part"
        )  # moved: a process that is killed leaves one or the other
        staged.write_text(json_text({"id": str(self.version), "told": self.told}), encoding="utf-8")
        staged.replace(self.file)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        at = step or 0
        if new := {
            name: value for name, value in metrics.items() if at > self.before.get(name, -1)
        }:
            super().log_metrics(new, step)  # type: ignore[safe-super]
            self.told |= dict.fromkeys(new, at)
            self._save()


class RunWandb(GoesOn, WandbLogger):
    def begin(self, file: Path, saved: dict[str, Any]) -> None:
        drop_anonymous(self)
        super().begin(file, saved)


class RunMLFlow(GoesOn, MLFlowLogger):
    def begin(self, file: Path, saved: dict[str, Any]) -> None:
        super().begin(file, saved)
        self.experiment.update_run(self.run_id, status="RUNNING")

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """MLflow's parameters never change: what a resume has changed is a tag."""
        known = self.experiment.get_run(self.run_id).data.params
        texts = {
            re.sub(r"[^\w/. -]", "_", name): str(value)[:250] for name, value in params.items()
        }
        super().log_hyperparams({name: text for name, text in texts.items() if name not in known})
        for name in known.keys() & texts.keys():
            if known[name] != texts[name]:
                self.experiment.set_tag(self.run_id, f"resumed/{name}", texts[name])


PACKAGES = {
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet-ml",
    "LitLogger": "litlogger",
}
OURS = {
    "TensorBoardLogger": RunTensorBoard,
    "CSVLogger": RunRows,
    "WandbLogger": RunWandb,
    "MLFlowLogger": RunMLFlow,
}


def check_packages(config: Any) -> None:
    """Raise UserError for a logger whose package is not installed. config: of trainer.logger."""
    for logger in configs_of_loggers(config):
        name = logger.class_path.rpartition(".")[2]
        package = PACKAGES.get(name)
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            raise UserError(f"{name} needs a package: pip install {package}", 2)


def make_loggers(
    cli: TrainingCLI, root: Path, run: Run | None, checkpoint: dict[str, Any] | None
) -> Any:
    """Those of trainer.logger, TensorBoard unless it says otherwise; what is not given follows from
    the run's folder.

    Raises UserError where one cannot start, such as without its server.
    """
    asked = cli.config.trainer.logger
    if asked is False or asked == []:
        return False
    if run is None:
        return [RunTensorBoard(root, version="")]  # writes nothing
    given = configs_of_loggers(asked)
    own = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=Namespace())
    loggers, names = [], []
    for config in given or [own]:
        name = config.class_path.rpartition(".")[2]
        names.append(name)
        file = run.folder / f".{name}{names.count(name)}.json"
        # a run that starts again has told what it may not tell again
        saved = (
            json.loads(file.read_text(encoding="utf-8"))
            if checkpoint and not run.is_new and file.is_file()
            else {}
        )
        # A resumed run drops its points from the checkpoint's step on. A new run has none, but
        # TensorBoard without its data server ignores the first purge of a run.
        purge_step = checkpoint["global_step"] if checkpoint and not run.is_new else 0
        try:
            logger = make_logger(cli, config, run, saved.get("id"), purge_step)
            if isinstance(logger, GoesOn):
                logger.begin(file, saved)
        except Exception as error:  # whatever a package or its server says
            raise UserError(f"{name} cannot start: {first_line(error)}") from error
        loggers.append(logger)
    return loggers


def make_logger(
    cli: TrainingCLI, config: Any, run: Run, run_id: str | None, purge_step: int
) -> Logger:
    """run_id: of the run at W&B or MLflow that it goes on with. purge_step: the first step that it
    writes anew."""
    name = config.class_path.rpartition(".")[2]
    title, version = str(cli.config.name), run.folder.name
    place = {"save_dir": run.folder.parents[1], "name": run.folder.parts[-2], "version": version}
    facts: dict[str, dict[str, Any]] = {
        "TensorBoardLogger": {**place, "default_hp_metric": False, "purge_step": purge_step},
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
        "AimLogger": {
            "repo": str(run.root),
            "experiment": title,
            "run_name": version,
            "run_hash": run_id,
        },
    }
    config = config.clone()
    given = {
        key: value
        for key, value in vars(config.get("init_args") or Namespace()).items()
        if value is not None
    }
    arguments = {**facts.get(name, {}), **given, **vars(config.get("dict_kwargs") or Namespace())}
    uri = str(arguments.get("tracking_uri", ""))
    if name == "MLFlowLogger" and ("://" not in uri or uri.startswith("file:")):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 wants to be told
    if config.class_path == f"lightning.pytorch.loggers.{name}" and name in OURS:
        logger: Logger = OURS[name](**arguments)
        if isinstance(logger, RunRows):
            logger.purge_step = purge_step
        return logger
    config.init_args = Namespace(arguments)
    made: Logger = cli.instantiate(Namespace(trainer=Namespace(logger=config))).trainer.logger
    return made


def curves(loggers: Sequence[Logger]) -> Iterator[str]:
    """Where to look at them; W&B says it itself."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            yield f"tensorboard --logdir {short(Path(logger.save_dir))}"
        elif isinstance(logger, CSVLogger):
            yield short(Path(logger.log_dir, "metrics.csv"))
        elif isinstance(logger, MLFlowLogger) and logger.save_dir:
            yield (
                "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri "
                f"{short(Path(logger.save_dir))}"
            )


@contextmanager
def ended(loggers: Any) -> Iterator[None]:
    """W&B's run ends with ours: another one of this process would go on in it."""
    status = 1
    try:
        yield
        status = 0
    finally:
        for logger in loggers or []:
            if isinstance(logger, RunWandb):
                logger.experiment.finish(status)
