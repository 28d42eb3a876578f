"""The loggers of a run: Lightning's own, told where the run lies."""

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger

from project.base.errors import UserError, first_line
from project.engine.cli import TrainingCLI
from project.engine.folder import Run, short
from project.engine.lasting import GoesOn, RunMLFlow, RunRows, RunTensorBoard, RunWandb
from project.engine.older import PACKAGE
from project.engine.parser import configs_of_loggers

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
            "project": os.environ.get("WANDB_PROJECT", PACKAGE),
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
