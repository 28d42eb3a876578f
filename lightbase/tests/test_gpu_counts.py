"""The table of operations, copies and waits in docs/performance.md, counted again, and
what keeps them few."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gpu_counts
import programs
import pytest
from paths import Train, fails

pytestmark = pytest.mark.gpu
REPO = Path(gpu_counts.SCRIPT).parents[1]
PAGE = REPO / "docs" / "performance.md"
CONFIGS = ("mnist_mlp", "cifar10_cnn", "mnist_cnn")
REWRITE = "REWRITE=1 pytest -n 0 lightbase/tests/test_gpu_counts.py, on a simulated GPU"
BEGIN, END = "<!-- counted by test_gpu_counts.py -->\n", "<!-- end of the counts -->\n"
HEAD = """\
| | operations a step | more in a log step | copies: step, log step | waits: both, checkpoint |
|---|---|---|---|---|
"""
MOST_IN_LOG_STEP = 20  # operations

Counts = dict[str, int]


def counted(config: Path, data_dir: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, gpu_counts.__file__, config, data_dir, folder]
    environment = os.environ | {"SIMGPU_TRACE": "1", "OMP_NUM_THREADS": "1"}
    return programs.start(command, cwd=REPO, stdout=subprocess.PIPE, env=environment)


def total(counts: Counts, kind: str) -> int:
    return sum(number for name, number in counts.items() if name.startswith(kind))


def row(name: str, steps: list[Counts], checkpoint: Counts) -> str:
    """The line of the table. Fails where more is asked of the GPU than there may be."""
    every = gpu_counts.EVERY
    log_steps = steps[every - 1 :: every]
    first, *ordinary = [step for i, step in enumerate(steps, 1) if i % every]
    assert total(first, "wait") == 1  # `FirstStep` reads the loss
    assert len(log_steps) == 3
    assert not [step for step in steps if any("pageable" in kind for kind in step)]
    assert {total(step, "wait") for step in ordinary} == {0}
    assert {total(step, "wait") for step in log_steps} == {1}
    waits = total(checkpoint, "wait")
    assert waits <= 1
    operations = Counter(total(step, "operation") for step in ordinary)
    ((usual, _),) = operations.most_common(1)
    more = max(total(step, "operation") for step in log_steps) - usual
    assert more <= MOST_IN_LOG_STEP, name
    copies = max(total(step, "copy") for step in ordinary)
    in_log_step = max(total(step, "copy") for step in log_steps)
    parts = (
        f"`{name}.yaml`",
        usual,
        more,
        f"{copies}, {in_log_step}",
        f"0, 1, {waits}",
    )
    return f"| {' | '.join(map(str, parts))} |\n"


@pytest.mark.skipif("SIMGPU_FOLDER" not in os.environ, reason="only simgpu counts")
def test_only_a_log_step_waits_once_and_the_table_is_what_is_counted(
    mnist_dir, cifar10_dir, tmp_path
):
    configs = [REPO / "configs" / f"{name}.yaml" for name in CONFIGS]
    runs = {
        config.stem: counted(config, mnist_dir, tmp_path / config.stem)
        for config in configs
        if config.exists()
    }
    outputs = {name: run.communicate(timeout=200)[0] for name, run in runs.items()}
    rows = [
        row(name, **json.loads(output.splitlines()[-1]))
        for name, output in outputs.items()
    ]
    if not rows or not PAGE.exists():
        pytest.skip("the repository has other experiments, or another page")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    if os.environ.get("REWRITE"):
        table = HEAD + "".join(rows)
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}")
    missing = [line for line in rows if line not in table]
    assert not missing, f"docs/{PAGE.name} has other counts: {REWRITE}"


def test_an_infinite_loss_ends_a_run_on_a_gpu(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("test_finite.Breaks.at_batch", 36)
    monkeypatch.setattr("test_finite.Breaks.value", float("inf"))
    flags = "--trainer.accelerator gpu --trainer.log_every_n_steps 5"
    error = fails(capsys, 1, lambda: train("--model test_finite.Breaks", flags))
    assert "NaN or infinite after step 38, in epoch 2" in error
