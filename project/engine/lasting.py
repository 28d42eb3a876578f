"""Lightning's loggers, going on where a resumed run goes on: no point twice, and none of before
lost."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from project.engine.folder import json_text
from project.engine.script import write_whole


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard sorts by name: `epoch`, which Lightning adds, goes behind loss and accuracy, as
    all of watch/."""

    def keep_points(self) -> None:
        self._kwargs["purge_step"] = None  # of the SummaryWriter that Lightning makes

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(
            {"watch/epoch" if name == "epoch" else name: metrics[name] for name in metrics}, step
        )


class RunRows(CSVLogger):
    """Keeps what metrics.csv has of the steps before `purge_step`, where Lightning deletes the
    file."""

    purge_step: float = 0

    def keep_points(self) -> None:
        self.purge_step = math.inf

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = Rows(self.log_dir, self.purge_step)
        return self._experiment


class Rows(ExperimentWriter):
    def __init__(self, log_dir: str, purge_step: float) -> None:
        super().__init__(log_dir)
        file = Path(self.metrics_file_path)
        if file.is_file():
            with file.open(newline="", encoding="utf-8") as lines:
                reader = csv.DictReader(lines)
                # a row that was cut short lacks values
                rows = [
                    row
                    for row in reader
                    if None not in row.values() and int(row["step"]) < purge_step
                ]
                self.metrics_keys = list(reader.fieldnames or [])
            self._write(rows)

    def _check_log_dir_exists(self) -> None:  # it deletes the file
        pass

    def _rewrite_with_new_header(
        self, fieldnames: list[str]
    ) -> None:  # it would be lost if the run was killed then
        with Path(self.metrics_file_path).open(newline="", encoding="utf-8") as lines:
            self._write(list(csv.DictReader(lines)))

    def _write(self, rows: Sequence[Mapping[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(Path(self.metrics_file_path), text.getvalue())


class GoesOn(Logger):
    """A logger whose points cannot be taken back: a resumed run leaves out those that it had
    written already.

    file: with the id of the run there, and the newest step of each curve.
    """

    file: Path
    told: dict[str, int]
    before: dict[str, int]

    def begin(self, file: Path, saved: dict[str, Any]) -> None:
        self.file, self.before = file, saved.get("told", {})
        self.told = dict(self.before)
        _ = self.experiment  # type: ignore[attr-defined]  # makes the run there
        self._save()

    def _save(self) -> None:
        staged = self.file.with_suffix(
            ".part"
        )  # moved: a process that is killed leaves one or the other
        staged.write_text(json_text({"id": str(self.version), "told": self.told}), encoding="utf-8")
        staged.replace(self.file)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        at = step or 0
        if new := {
            name: value for name, value in metrics.items() if at > self.before.get(name, -1)
        }:
            super().log_metrics(new, step)  # type: ignore[safe-super]
            self.told |= dict.fromkeys(new, at)
            self._save()


class RunWandb(GoesOn, WandbLogger):
    def begin(self, file: Path, saved: dict[str, Any]) -> None:
        self._wandb_init.pop("anonymous")  # of which W&B warns, and which Lightning always gives
        super().begin(file, saved)


class RunMLFlow(GoesOn, MLFlowLogger):
    def begin(self, file: Path, saved: dict[str, Any]) -> None:
        super().begin(file, saved)
        self.experiment.update_run(self.run_id, status="RUNNING")

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """MLflow's parameters never change: what a resume has changed is a tag."""
        known = self.experiment.get_run(self.run_id).data.params
        texts = {
            re.sub(r"[^\w/. -]", "_", name): str(value)[:250] for name, value in params.items()
        }
        super().log_hyperparams({name: text for name, text in texts.items() if name not in known})
        for name in known.keys() & texts.keys():
            if known[name] != texts[name]:
                self.experiment.set_tag(self.run_id, f"resumed/{name}", texts[name])
