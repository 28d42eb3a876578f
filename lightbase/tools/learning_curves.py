"""The learning curves of several runs side by side, from their event files."""

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightbase.errors import UserError
from lightbase.folder import write_whole
from lightbase.tools.found_runs import FoundRun
from lightbase.tools.tables import count

Curves = dict[tuple[str, str], tuple[list[int], list[float]]]
"""By measure and stage, ("loss", "val"): steps and values."""


def read_curves(folder: Path) -> Curves:
    """As TensorBoard would show them; its reader leaves out what a resume has written again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not any(folder.glob("events.out.tfevents.*")):
        return {}
    kinds = dict.fromkeys(("images", "histograms", "compressedHistograms", "audio", "tensors"), 1)
    events = EventAccumulator(str(folder), size_guidance={**kinds, "scalars": 0}).Reload()
    curves: Curves = {}
    for tag in events.Tags()["scalars"]:
        if match := re.fullmatch(r"(train|val)[/_](.+)", tag):  # our names, and many a module's own
            points = events.Scalars(tag)
            curves[match[2], match[1]] = (
                [point.step for point in points],
                [point.value for point in points],
            )
    return curves


def draw_curves(runs: Sequence[FoundRun], file: Path) -> None:
    """A row for each measure, its training beside its validation; the loss first."""
    found = {run.path: curves for run in runs if (curves := read_curves(run.folder))}
    missing = [run.path for run in runs if run.path not in found]
    if not found:
        raise UserError(
            f"--plot: no event file of {', '.join(missing[:5])} has a curve of train/ or val/"
        )
    import matplotlib
    from matplotlib.figure import Figure

    measures = sorted({measure for curves in found.values() for measure, _ in curves})
    measures.sort(key=lambda measure: measure != "loss")
    height = max(2.6 * len(measures), 0.2 * len(found) + 0.6)
    figure = Figure((11, height), dpi=100, layout="constrained")
    grid: Any = figure.subplots(len(measures), 2, squeeze=False, sharey="row", sharex=True)
    name = "tab10" if len(found) <= 10 else "turbo"  # the latter has a shade for each of many
    shades = matplotlib.colormaps[name].resampled(max(10, len(found)))(range(len(found)))
    lines = {}
    for measure, row in zip(measures, grid, strict=True):
        for stage, axes in zip(("train", "val"), row, strict=True):
            axes.set_title(f"{stage}/{measure}", fontsize=9)
            for (path, curves), shade in zip(found.items(), shades, strict=False):
                x, y = curves.get((measure, stage), ([], []))
                (lines[path],) = axes.plot(
                    x, y, color=shade, linewidth=1.2, marker="." if len(x) < 20 else None
                )
    for axes in grid[-1]:
        axes.set_xlabel("step")
    legend = figure.legend(
        list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=8
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may have two $
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing"
        )  # a name may be in any script: boxes stand for it
        figure.savefig(buffer, format=file.suffix[1:].lower())
    write_whole(file, buffer.getbuffer())
    print(f"Learning curves of {count(len(found), 'run')}: {file}")
    if missing:
        print(f"Without curves: {', '.join(missing)}")
