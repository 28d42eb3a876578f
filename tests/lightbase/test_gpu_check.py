"""tests/gpu_check.sh, as far as a machine without a GPU can go."""

import subprocess
import sys
from pathlib import Path

import pytest
from paths import HERE


@pytest.mark.slow
def test_its_dry_run_trains_watches_and_reports(tmp_path: Path) -> None:
    only = ("--only", "optimiser SGD", "waits", "strategy dp")
    command = [sys.executable, "gpu_checks.py", "--dry", "--output", tmp_path, *only]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert "| optimiser SGD | passed |" in table
    assert "| waits | passed |" in table
    assert "| strategy dp | not run |  | needs a GPU |" in table
    assert "0 on others" in (tmp_path / "waits.txt").read_text()
    assert "2 passed, 0 failed, 1 not run" in done.stdout


@pytest.mark.slow
def test_a_check_that_fails_is_in_the_table_and_the_status(tmp_path: Path) -> None:
    command = [sys.executable, "gpu_checks.py", "--output", tmp_path, "--only", "optimiser SGD"]
    done = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 1
    assert "| optimiser SGD | **failed** |" in done.stdout
    assert "no GPU was found; use --trainer.accelerator cpu" in done.stdout
