"""Pictures for the loggers of a run."""

from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from lightbase.core.curves import newest_step


def has_pictures(trainer: Any) -> bool:
    """Return whether one of the loggers takes pictures."""
    takers = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return any(isinstance(logger, takers) for logger in trainer.loggers)


def log_figure(trainer: Any, tag: str, figure: Any) -> None:
    """Give a picture to the loggers that take one, at the newest step. MLflow gets the
    artifact TAG/STEP.png."""
    step = newest_step(trainer)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, figure, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [figure], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{tag}/{step}.png")
