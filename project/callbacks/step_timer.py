"""Where a training step's time goes, as curves, charts and a table."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler

from project.base.rank import say
from project.callbacks import charts
from project.callbacks.phase_clock import PHASES, PhaseClock


class StepTimer(Callback):
    """Shows how the time of training is shared out among the phases of its steps, on the first process.

    Written: `step_time/PHASE_percent` and `step_time/step_ms` for every epoch, the charts `step_time/pie` (that epoch)
    and `step_time/epochs` (milliseconds a step, a bar an epoch), and a table in the terminal at the end.

    Its clock is the Trainer's profiler, as Lightning tells that one what begins and ends; with another profiler it
    rests.

    every_n_epochs: of the charts, which are also drawn at the end; 0 draws none.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.clock = PhaseClock()
        self.every_n_epochs = every_n_epochs
        self.epochs: list[dict[str, float]] = []
        """Seconds of each phase, and `num_steps`, of each epoch, those before a resume included."""
        self.num_charted = 0
        self.first_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.epochs:
            self.epochs = state_dict["epochs"]
            self.num_charted = len(self.epochs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        if isinstance(trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
            trainer.profiler = self.clock  # type: ignore[attr-defined]
        else:
            say(f"Step timer: off beside the {type(trainer.profiler).__name__}")  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.num_steps = trainer.global_step
        self.first_epoch = len(self.epochs)
        if self._is_on(trainer):
            self.clock.begin(trainer.strategy.root_device)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on(trainer):
            return
        num_steps, self.num_steps = trainer.global_step - self.num_steps, trainer.global_step
        self.epochs.append({**self.clock.take(), "num_steps": num_steps})
        if isinstance(trainer.logger, TensorBoardLogger):
            row = self.epochs[-1]
            values = {f"step_time/{phase}_percent": 100 * share for phase, share in shares(row).items()}
            if num_steps:
                values["step_time/step_ms"] = 1e3 * total(row) / num_steps
            for name, value in values.items():
                trainer.logger.experiment.add_scalar(name, value, trainer.global_step - 1)
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on(trainer):
            return
        if self.epochs:  # the last checkpoints were written after its end
            rest = self.clock.take()
            self.epochs[-1] = {name: value + rest.get(name, 0) for name, value in self.epochs[-1].items()}
            self._draw(trainer)
        self.clock.end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on(trainer) and (table := self.table()):  # below the bar, which is closed now
            say(table)

    def sum(self) -> dict[str, float]:
        """Of the epochs since the start or the resume; empty without a step."""
        rows = self.epochs[self.first_epoch :]
        row = {name: sum(row[name] for row in rows) for name in rows[0]} if rows else {}
        return row if row and row["num_steps"] and total(row) else {}

    def step_seconds(self) -> dict[str, float]:
        """The same without what lies between epochs."""
        row = self.sum()
        return row and {**row, "other": row["other"] - row["between"]}

    def table(self) -> str:
        """A line a phase: its share and milliseconds a step; empty where no step was made."""
        row = self.sum()
        if not row:
            return ""
        lines = [
            f"Where the time of training went ({int(row['num_steps']):,} steps of {step_ms(row):.2f} ms, "
            f"without {row['validation']:.1f} s of validation):"
        ]
        for phase, share in shares(row).items():
            lines.append(f"  {PHASES[phase]:<24}{share:>7.1%}{share * step_ms(row):>10.3f} ms")
        return "\n".join(lines)

    def _is_on(self, trainer: Trainer) -> bool:
        return trainer.profiler is self.clock and trainer.is_global_zero  # type: ignore[attr-defined]

    def _draw(self, trainer: Trainer) -> None:
        if not self.every_n_epochs or not isinstance(trainer.logger, TensorBoardLogger):
            return
        drawn = [row for row in self.epochs if total(row)]
        if not drawn or self.num_charted == len(self.epochs):
            return
        self.num_charted = len(self.epochs)
        step = max(0, trainer.global_step - 1)
        labels = [f"{PHASES[phase]} {share:.0%}" for phase, share in shares(drawn[-1]).items()]
        title = f"Epoch {len(self.epochs)}: a step of {step_ms(drawn[-1]):.2f} ms"
        pie = charts.pie(list(shares(drawn[-1]).values()), labels, title)
        charts.write(trainer.logger.experiment, "step_time/pie", pie, step)
        heights = {label: [row[phase] / total(row) * step_ms(row) for row in drawn] for phase, label in PHASES.items()}
        bars = charts.stacked_bars(heights, "epoch", "ms a step")
        charts.write(trainer.logger.experiment, "step_time/epochs", bars, step)


def total(row: dict[str, float]) -> float:
    return sum(row[phase] for phase in PHASES)


def shares(row: dict[str, float]) -> dict[str, float]:
    """Of each phase, in [0, 1]."""
    return {phase: row[phase] / total(row) if total(row) else 0.0 for phase in PHASES}


def step_ms(row: dict[str, float]) -> float:
    return 1e3 * total(row) / max(1, row["num_steps"])
