"""tests/gpu_check.sh, as far as a machine without a GPU can go."""

import subprocess
import sys
from pathlib import Path

import gpu_checks
import pytest
from paths import HERE

COMMAND = [sys.executable, "gpu_checks.py", "--output"]


@pytest.mark.slow
def test_its_dry_run_trains_watches_and_reports(tmp_path: Path) -> None:
    only = ("--dry", "--only", "features", "augmentations", "strategy dp")
    done = subprocess.run(
        [*COMMAND, tmp_path, *only], cwd=HERE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    for name in ("features", "augmentations"):
        assert f"| {name} | passed |" in table
    assert "| strategy dp | not run |  | needs a GPU |" in table
    assert "2 passed, 0 failed, 1 not run" in done.stdout


def test_results_that_differ_are_named() -> None:
    trained = "Test of the best checkpoint x: test/acc {}, test/loss 0.5\n"
    assert gpu_checks.same_numbers(trained.format(0.5) + trained.format(0.5)) == ""
    assert "['test/acc'] differ" in gpu_checks.same_numbers(
        trained.format(0) + trained.format(1)
    )
    evaluated = '{"test/acc": 0.4}\n{"test/acc": 0.3}\n'
    assert "['test/acc'] differ" in gpu_checks.same_numbers(
        trained.format(0.4) + evaluated
    )
