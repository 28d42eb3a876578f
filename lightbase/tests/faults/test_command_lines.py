"""Command lines and configs with whatever a person could type: a run, or an error of
a few lines, and nothing else.

FAULT_EXAMPLES=1000 pytest -m slow lightbase/tests/faults/test_command_lines.py   # other ones
each time
"""

import contextlib
import io
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from paths import TINY, time_limit

from lightbase.commands.train import main

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
NUM_EXAMPLES = int(os.environ.get("FAULT_EXAMPLES", 15))
SECONDS = 60  # more for one example is a hang
BASE: dict[str, Any] = yaml.safe_load(Path(TINY).read_text())
BASE["trainer"] |= {"max_epochs": 1, "log_every_n_steps": 2}
BASE["data"]["init_args"] |= {"num_train": 96, "num_test": 24}


POSSIBLE, IMPOSSIBLE = "possible", "impossible"
TYPED = yaml.safe_load(Path(__file__).with_name("typed.yaml").read_text("utf-8"))
Setting = tuple[str, str, str]  # flag, value, label
SETTINGS = [
    (flag, value, label)
    for flag, labels in TYPED.items()
    for label, values in labels.items()
    for value in values.split("|")
]


def several(found: list[Setting]) -> st.SearchStrategy[list[Setting]]:
    return st.lists(
        st.sampled_from(found), min_size=1, max_size=4, unique_by=lambda x: x[0]
    )


# half of them are mostly runs: one wrong value would end the others before much has
# happened
TYPED_SETTINGS = several(SETTINGS) | several([x for x in SETTINGS if x[2] == POSSIBLE])


def check(args: list[str], root: Path, labels: list[str]) -> None:
    """Run a command line; raises AssertionError, or what the run raises, where it is
    not as it must be."""
    out, err, status = io.StringIO(), io.StringIO(), None
    try:
        with (
            time_limit(SECONDS),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            main([*args, "--trainer.default_root_dir", str(root)])
    except SystemExit as ended:
        status = ended.code
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
    error = err.getvalue()
    assert "Traceback" not in error
    if status is None:
        assert IMPOSSIBLE not in labels, "accepted"
        return
    assert status in (1, 2), status
    assert error.startswith("error: "), error
    assert len(error.strip().splitlines()) <= 6, error
    assert labels != [POSSIBLE], error
    kept = [folder for folder in root.rglob("version_*") if folder.is_dir()]
    if status == 2:
        assert not kept
    for folder in kept:  # stopped in training, after a step
        progress = json.loads((folder / "progress.json").read_text())
        assert progress["steps"], f"{folder} is left"


def of_command(settings: list[Setting]) -> list[str]:
    return [f"--{flag}={value}" for flag, value, _ in settings]


def of_yaml(settings: list[Setting], root: Path) -> list[str]:
    """The same in a config: each value as it is typed, behind its key."""
    lines = [f"{flag}: {value}" for flag, value, _ in settings]
    path = root / "typed.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return ["--config", str(path)]


@pytest.mark.slow
@pytest.mark.parametrize("is_yaml", [False, True])
@hypothesis.settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize="FAULT_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(values=TYPED_SETTINGS)
def test_what_is_typed_is_a_run_or_a_short_error(
    is_yaml: bool, values: list[Setting]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "base.yaml").write_text(yaml.safe_dump(BASE))
        args = ["--config", str(root / "base.yaml")]
        args += of_yaml(values, root) if is_yaml else of_command(values)
        check(args, root, [label for *_, label in values])
