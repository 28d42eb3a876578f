"""Windows of series, for forecasts: `windows` makes what `load` may return."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightbase.data.loader import TensorBatches
from lightbase.data.splits import time_spans
from lightbase.data.tensors import as_tensors, convert_types


@dataclass(eq=False)
class Windows(TensorBatches):
    """Windows as views of their series. A batch is a copy of its windows.

    Args:
        all_values: The views (inputs, targets) of all windows that `series` could have.
        index: The first steps of the windows, int64 (N,).
        series: The steps of all series, (T, ...).
        step_times: The time of each step, (T,).
        size, length: The number of steps of a window, and of its inputs.
    """

    series: Any = None
    step_times: Any = None
    size: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        whole = self.series.unfold(0, self.size, 1).movedim(-1, 1)  # (M, size, ...)
        self.all_values = whole[:, : self.length], whole[:, self.length :]
        super().__post_init__()
        self.num_bytes = self.series.nbytes

    @property
    def times(self) -> Tensor:  # type: ignore[override]
        """The first and the last time of each window, (N, 2)."""
        spans = self.step_times.unfold(0, self.size, 1)
        return spans[:, :: self.size - 1][self.index]

    @property
    def targets(self) -> Tensor:
        """The last step of each window, (N, channels): all targets would take much
        memory."""
        return self.all_values[1][:, -1][self.index]

    def to(self, device: torch.device) -> "Windows":
        index: Any = self.index
        return replace(self, series=self.series.to(device), index=index.to(device))


def windows(
    series: Any,
    length: int,
    horizon: int,
    stride: int = 1,
    *,
    names: Any = 0,
    times: Any = None,
) -> Windows:
    """Return windows of one or several series as samples: inputs (N, length, channels)
    and targets (N, horizon, channels), the steps that follow. `load` may return them.
    They take the memory of the series, and of 8 bytes a window. No window has steps of
    two series.

    Args:
        series: An array (T, channels) or (T,), or a list of such arrays. float64
            becomes float32.
        length: Steps of the inputs.
        horizon: Steps of the targets.
        stride: Steps from one window to the next.
        names: For several series in one array, the name of the series of each step,
            numbers or texts (T,).
        times: The time of each step, see `BaseDataModule.times`: (T,), for a list those
            of one series after the other. The steps of a series are put into this
            order. Without times, the order of the steps in the array, or of the list,
            is that of a split.

    `select(indices)` of the result returns some of the windows. Its attribute `times`
    is for `seeded_part(len(w), split, times=w.times)`.
    """
    if isinstance(series, list | tuple):
        series = [*map(as_tensors, series)]
        names = np.repeat(range(len(series)), [*map(len, series)])
        series = torch.cat(series)
    steps = convert_types(as_tensors(series))
    num, size = len(steps), length + horizon
    step_times = time_spans(times, num, "windows")[:, 0]
    names = np.broadcast_to(names, num)
    order = np.lexsort((step_times, names))
    if (np.diff(order) != 1).any():
        steps, step_times, names = steps[order], step_times[order], names[order]
    is_whole = torch.from_numpy(names[: 1 - size] == names[size - 1 :])
    index = is_whole.nonzero()[::stride, 0]
    return Windows(None, index, False, steps, step_times, size, length)
