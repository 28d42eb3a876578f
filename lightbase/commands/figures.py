"""What a network gets right and wrong, for notebooks.

The pictures are those that a training draws for TensorBoard, see
lightbase/extras/figures.py.
"""

from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from lightbase.commands.checkpoint import open_run
from lightbase.commands.script import python_errors
from lightbase.core.curves import RunFolder
from lightbase.core.errors import UserError
from lightbase.extras.figures import PredictionFigures

CONFUSION = "confusion_matrix"


def evaluated(run: Any, split: str, picture: str = "") -> PredictionFigures:
    """Test a run, or validate it. Return the callback that has the predictions and the
    pictures. Raise UserError if none of them has a name with `picture`."""
    kept = PredictionFigures(every_n_epochs=1)
    with python_errors():
        trainer, module, kept.data = open_run(run, [RunFolder(None), kept])
        evaluate = {"test": trainer.test, "val": trainer.validate}[split]
        evaluate(module, kept.data, verbose=False)
        if not any(picture in name for name in kept.figures):
            raise UserError(
                f"{type(module).__name__} has no picture {picture} of split {split}",
                "the data may have no such samples; docs/tensorboard.md has the tasks",
            )
    return kept


def pictures(run: Any, split: str = "test") -> dict[str, Figure]:
    """Return the pictures that TensorBoard shows of a test or validation, by name.
    "predictions" of images has the worst mistakes first.

    run: See `lightbase.predict`.
    split: "test" or "val".
    Raise UserError if there are no such samples, or if the task has no pictures.
    """
    return evaluated(run, split).figures


def confusion_matrix(run: Any, split: str = "test") -> Figure:
    """Draw how often each class is predicted as which class. See `pictures`."""
    return evaluated(run, split, CONFUSION).figures[CONFUSION]


def mistakes(run: Any, split: str = "test") -> Tensor:
    """Return the positions of the samples whose class is predicted wrong, int64 (M,),
    the surest mistake first. See `pictures`."""
    kept = evaluated(run, split, CONFUSION)
    true, predicted, shares = kept.columns
    # the loss ignores classes below 0
    is_wrong = (true != predicted) & (true >= 0)
    order = shares[is_wrong].argsort(descending=True)
    return kept.indices[is_wrong][order]
