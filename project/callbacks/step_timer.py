"""Where a training step's time goes, as curves, charts and a table."""

from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler

from project.base.rank import say
from project.callbacks import charts
from project.callbacks.phase_clock import PHASES, PhaseClock


class StepTimer(Callback):
    """Shows how the time of training is shared out among the phases of its steps, on the first
    process.

    Written, in watch/step_time/: `PHASE_percent` and `step_ms` for every epoch, `pie` of one; and a
    table in the terminal at the end.

    Its clock is the Trainer's profiler, as Lightning tells that one what begins and ends; with
    another it rests.

    every_n_epochs: of the pie, which is also drawn at the end; 0 draws none.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.clock = PhaseClock()
        self.every_n_epochs = every_n_epochs
        self.epochs: list[
            dict[str, float]
        ] = []  # seconds of each phase, and `num_steps`; also before a resume
        self.first_epoch = 0
        self.is_drawn = True  # the last epoch, in the pie
        self.logs: dict[str, int] = {}  # calls of self.log, by name

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.epochs:  # the test loads a checkpoint too
            self.epochs = state_dict["epochs"]

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.first_epoch, self.num_steps = len(self.epochs), trainer.global_step
        if not trainer.is_global_zero:
            return
        if isinstance(trainer.profiler, PassThroughProfiler | PhaseClock):
            trainer.profiler = self.clock
            self.clock.begin(trainer.strategy.root_device)
            self._time_logs(
                trainer.fit_loop.epoch_loop._results
            )  # where self.log ends up; its profiler hears nothing
        else:
            say(f"Step timer: off beside the {type(trainer.profiler).__name__}")

    def _time_logs(self, results: Any) -> None:
        self.logs, log = {}, type(results).log

        def timed(hook: str, name: str, *args: Any, **kwargs: Any) -> None:
            self.logs[name] = self.logs.get(name, 0) + 1
            with self.clock.profile("log"):
                log(results, hook, name, *args, **kwargs)

        results.log = timed

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.profiler is not self.clock:
            return
        num_steps, self.num_steps = trainer.global_step - self.num_steps, trainer.global_step
        row = {**self.clock.take(), "num_steps": num_steps}
        self.epochs.append(row)
        self.is_drawn = self.every_n_epochs == 0
        values = {
            f"watch/step_time/{phase}_percent": 100 * share for phase, share in shares(row).items()
        }
        if num_steps:
            values["watch/step_time/step_ms"] = step_ms(row)
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step - 1)
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.profiler is not self.clock:
            return
        if self.epochs:  # the last checkpoints were written after its end
            rest = self.clock.take()
            self.epochs[-1] = {
                name: value + rest.get(name, 0) for name, value in self.epochs[-1].items()
            }
        if not self.is_drawn:
            self._draw(trainer)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """A line a phase in the terminal, below the bar, which is closed now: its share and
        milliseconds a step."""
        if row := self.sum():
            steps = f"{row['num_steps']:,} steps of {step_ms(row):.2f} ms"
            rest = (
                f"{row['validation']:.1f} s of validation and {row['between']:.1f} s between epochs"
            )
            say(f"Where the time of training went ({steps}, without {rest}):")
            for phase, share in shares(row).items():
                say(f"  {PHASES[phase]:<24}{share:>7.1%}{share * step_ms(row):>10.3f} ms")

    def sum(self) -> dict[str, float]:
        """Of the epochs since the start or the resume; empty without a step."""
        rows = self.epochs[self.first_epoch :]
        if not any(row["num_steps"] for row in rows):
            return {}
        return {name: sum(row[name] for row in rows) for name in rows[0]}

    def _draw(self, trainer: Any) -> None:
        self.is_drawn = True
        if not charts.has_pictures(trainer.loggers):
            return
        step, row = max(0, trainer.global_step - 1), self.epochs[-1]
        labels = [f"{PHASES[phase]} {share:.0%}" for phase, share in shares(row).items()]
        title = f"Epoch {len(self.epochs)}: a step of {step_ms(row):.2f} ms"
        pie = charts.pie(list(shares(row).values()), labels, title)
        charts.write(trainer.loggers, "watch/step_time/pie", pie, step)


def total(row: dict[str, float]) -> float:
    return sum(row[phase] for phase in PHASES)


def shares(row: dict[str, float]) -> dict[str, float]:
    """Of each phase, in [0, 1]."""
    return {phase: row[phase] / total(row) for phase in PHASES}


def step_ms(row: dict[str, float]) -> float:
    return 1e3 * total(row) / max(1, row["num_steps"])
