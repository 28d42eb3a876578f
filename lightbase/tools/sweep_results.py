"""What sweep.py ends with: the table of its trials, the mean over folds or seeds, the best flags,
plots."""

import shlex
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import optuna
from optuna.trial import FrozenTrial, TrialState

from lightbase.errors import UserError
from lightbase.folder import short, versions, write_whole
from lightbase.run.selection import Selection
from lightbase.tools.sweep_search import Dimension
from lightbase.tools.tables import as_csv, as_table

REPEATS = (
    "data.fold",
    "seed_everything",
)  # searched, they repeat a training: what counts is the mean over them
NO_METRICS = ("test/num_samples",)


def repeats_of(dimensions: Sequence[Dimension]) -> list[str]:
    return [found.flag for found in dimensions if found.flag in REPEATS]


def state(trial: FrozenTrial) -> str:
    return {TrialState.COMPLETE: "finished", TrialState.FAIL: "failed"}.get(
        trial.state, trial.state.name.lower()
    )


def best_value(trial: FrozenTrial) -> float | None:
    """Of the monitored metric: that of best.ckpt."""
    found = trial.user_attrs.get("best") if trial.state == TrialState.PRUNED else trial.value
    return None if found is None else float(found)


def tests(trial: FrozenTrial) -> dict[str, float]:
    return {
        key: value
        for key, value in trial.user_attrs.items()
        if key.startswith("test/") and value is not None
    }


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def params(trial: FrozenTrial) -> dict[str, Any]:
    """By flags, null, true and false as they are typed."""
    typed = {None: "null", True: "true", False: "false"}
    return {
        flag: typed[value] if value is None or value is True or value is False else value
        for flag, value in trial.params.items()
    }


def line(trial: FrozenTrial, monitor: str | None) -> str:
    """Of a trial that has ended."""
    values = ", ".join(f"{flag} {number(value)}" for flag, value in params(trial).items())
    if trial.state == TrialState.FAIL:
        return (
            f"trial_{trial.number:03d} failed ({values}): "
            f"{trial.user_attrs.get('reason', '')[:160]}"
        )
    found = {monitor: best_value(trial)} if monitor else {}
    found |= {key: value for key, value in tests(trial).items() if key not in NO_METRICS}
    metrics = ", ".join(f"{key} {number(value)}" for key, value in found.items())
    return f"trial_{trial.number:03d} {state(trial)} ({values}): {metrics}"


def table_of(
    trials: Sequence[FrozenTrial],
    flags: Sequence[str],
    monitor: str | None,
    attributes: Sequence[str],
) -> list[list[Any]]:
    """A header, and a row a trial; None where it has no value. attributes: what a trial has noted,
    a column each."""
    rows: list[list[Any]] = [
        ["trial", "state", *flags, *([monitor] if monitor else []), *attributes]
    ]
    for trial in trials:
        own = [params(trial).get(flag) for flag in flags] + ([best_value(trial)] if monitor else [])
        own += [trial.user_attrs.get(key) for key in attributes]
        rows.append([f"trial_{trial.number:03d}", state(trial), *own])
    return rows


def print_table(rows: Sequence[Sequence[Any]]) -> None:
    print("\n".join(as_table([[*map(number, row)] for row in rows])))


def show(
    study: optuna.Study,
    folder: Path,
    dimensions: Sequence[Dimension],
    selection: Selection | None,
    command: str,
) -> None:
    trials, flags = study.get_trials(), [found.flag for found in dimensions]
    monitor, repeats = selection and selection.monitor, repeats_of(dimensions)
    known = dict.fromkeys(
        key for trial in trials for key in trial.user_attrs if key not in ("is_mistake", "best")
    )
    shown = [key for key in known if key.startswith("test/") and key not in NO_METRICS]
    print_table(table_of(trials, flags, monitor, [*shown, "train_seconds"]))
    write_whole(folder / "trials.csv", as_csv(table_of(trials, flags, monitor, [*known])))
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not done:
        raise UserError(f"no trial was completed: see {short(folder / 'trial_000' / 'output.txt')}")
    others = [found for found in dimensions if found.flag not in repeats]
    if drawn := selection is not None and bool(others):
        draw(study, done, folder)
    best = study.best_trial if selection and not repeats else None
    if repeats:
        best = show_repeats(done, others, repeats, selection)
    plots = ", history.png and importance.png" if drawn else ""
    print(f"Trials: {short(folder)}/trial_*/version_0, trials.csv, study.db{plots}")
    if best is None or not others:
        return
    values = [
        f"--{found.flag} {shlex.quote(found.text(best.params[found.flag]))}" for found in others
    ]
    values += ["--data.num_folds null"] * ("data.fold" in repeats)
    print(f"Best flags: {command} {' '.join(values)}")
    if not repeats:
        run = list(versions(folder / f"trial_{best.number:03d}").values())[-1]
        print(
            f"Best checkpoint, {monitor} {number(best.value)}: "
            f"{short(run / 'checkpoints' / 'best.ckpt')}"
        )


def show_repeats(
    done: Sequence[FrozenTrial],
    others: Sequence[Dimension],
    repeats: Sequence[str],
    selection: Selection | None,
) -> FrozenTrial | None:
    """Mean, spread and standard error over folds or seeds, for each combination of the other
    values. Returns a trial of the best one by the mean of the monitored metric."""
    groups: dict[tuple[Any, ...], list[FrozenTrial]] = {}
    for trial in done:
        groups.setdefault(tuple(params(trial)[found.flag] for found in others), []).append(trial)
    rows: list[list[Any]] = [
        [*(found.flag for found in others), "metric", "n", "mean", "spread", "standard error"]
    ]
    for values, trials in groups.items():
        for key in dict.fromkeys(key for trial in trials for key in tests(trial)):
            if key not in NO_METRICS:
                found = [tests(trial)[key] for trial in trials if key in tests(trial)]
                spread = statistics.stdev(found) if len(found) > 1 else None
                error = None if spread is None else spread / len(found) ** 0.5
                cells = [len(found), statistics.fmean(found), spread, error]
                rows.append([*values, key, *cells])
    print(f"Over {' and '.join(repeats)}:")
    print_table(rows)
    for values, trials in groups.items():
        if "data.fold" in repeats and len(repeats) == 1:
            tested = sum(int(tests(trial).get("test/num_samples", 0)) for trial in trials)
            of = f" ({', '.join(map(number, values))})" if values else ""
            print(f"Samples tested{of}: {tested:,} in {len(trials)} folds")
    if selection is None:
        return None
    sign = 1 if selection.mode == "max" else -1
    return max(
        groups.values(),
        key=lambda trials: sign * statistics.fmean(trial.value or 0.0 for trial in trials),
    )[0]


def draw(study: optuna.Study, done: Sequence[FrozenTrial], folder: Path) -> None:
    """Optuna's plots, as PNG."""
    mpl.use("Agg")  # no window
    plots: Any = optuna.visualization.matplotlib
    varied = [flag for flag in done[0].params if len({trial.params[flag] for trial in done}) > 1]
    with warnings.catch_warnings():
        # Optuna calls its plots experimental since 2.2
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        drawn = {"history.png": plots.plot_optimization_history(study)}
        if len(done) > 2 and varied and len({trial.value for trial in done}) > 1:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            drawn["importance.png"] = plots.plot_param_importances(
                study, evaluator=evaluator, params=varied
            )
    for name, axes in drawn.items():
        axes.figure.savefig(folder / name, bbox_inches="tight")
        axes.figure.clear()
