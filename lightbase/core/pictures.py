"""Pictures for notebooks, and for the loggers of a run: TensorBoard, W&B and MLflow
take them."""

import io
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from lightbase.core.curves import newest_step, num_steps


class Picture(Figure):
    """A Figure of matplotlib that a notebook shows, also without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the content of a PNG file. Jupyter calls this."""
        return as_png(self).getvalue()


def as_png(figure: Figure) -> io.BytesIO:
    """Return a PNG file in memory."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image


def has_pictures(trainer: Any) -> bool:
    """Return whether one of the Trainer's loggers takes pictures. If none does, the
    caller need not draw them."""
    takers = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return any(isinstance(logger, takers) for logger in trainer.loggers)


def log_figure(trainer: Any, tag: str, figure: Any) -> None:
    """Give a picture to all loggers that take pictures, at the newest step of the
    curves. All texts are drawn as they are: `$` in a class name begins no formula.

    tag: The name of the picture. In MLflow it is the artifact TAG/STEP.png.
    figure: A Figure of matplotlib.
    """
    step = newest_step(trainer)
    if trainer.testing:  # the curves of the test are at this step, too
        step = num_steps(trainer)
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, figure, step)
        elif isinstance(logger, WandbLogger):
            # W&B takes a Figure, but no subclass of it
            logger.log_image(tag, [Image.open(as_png(figure))], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{tag}/{step}.png")
