"""tests/gpu_check.sh, as far as a machine without a GPU can go."""

import subprocess

import gpu_checks
import pytest
from paths import HERE


@pytest.mark.slow
def test_its_dry_run_trains_watches_and_reports(tmp_path):
    command = f"bash {HERE.parents[1]}/tests/gpu_check.sh --dry --output {tmp_path}"
    only = ["--only", "features", "augmentations", "strategy dp"]
    output = subprocess.check_output([*command.split(), *only], text=True)
    table = (tmp_path / "table.md").read_text()
    for name in ("features", "augmentations"):
        assert f"| {name} | passed |" in table
    assert "| strategy dp | not run | 0 | needs a GPU |" in table
    assert "2 passed, 0 failed, 1 not run" in output


def test_results_that_differ_are_named() -> None:
    trained = "Test of the best checkpoint x: test/acc {}, test/loss 0.5\n"
    one, other = trained.format(0.5), trained.format(0.4)
    assert gpu_checks.same_numbers(one + one) == ""
    assert "['test/acc'] differ" in gpu_checks.same_numbers(one + other)
    evaluated = '{"test/acc": 0.4}\n{"test/acc": 0.3}\n'
    assert "['test/acc'] differ" in gpu_checks.same_numbers(one + evaluated)
