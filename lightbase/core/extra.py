"""The base class of the extras, the parts that a training can do without."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger

from lightbase.core.folder import Run
from lightbase.core.spec import RunSpec


class Extra(Callback):
    """A callback with three more methods, which `lightbase.core.run.train` calls. It
    only watches: the weights are the same without it.

    is_first: Whether Lightning calls it before all other callbacks.
    """

    is_first = False

    def before_run(
        self, spec: RunSpec, model: LightningModule, data: LightningDataModule
    ) -> None:
        """Check what can be checked before the run has a folder. Only the first process
        (rank 0) calls this. Raise UserError for a mistake of the user."""

    def around_run(
        self, spec: RunSpec, model: LightningModule, run: Run | None
    ) -> AbstractContextManager[Sequence[Logger]]:
        """Return a context around the training and the test. Its value is a list of the
        loggers that are open within it.

        run: The run's folder, or None in a process that writes nothing.
        """
        return nullcontext(())

    def check_best(self, checkpoint: dict[str, Any]) -> None:
        """Raise UserError if `checkpoint`, which Lightning is about to save as
        best.ckpt, must not be written."""
