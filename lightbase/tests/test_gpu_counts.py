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
import torch
from paths import Train
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightbase.core import metrics
from lightbase.core.batches import tensors_in
from lightbase.core.checkpoint import AtomicCheckpointIO
from lightbase.core.metrics import Accumulator

pytestmark = pytest.mark.gpu
REPO = Path(gpu_counts.SCRIPT).parents[1]
PAGE = REPO / "docs" / "performance.md"
CONFIGS = ("mnist_mlp", "cifar10_cnn", "mnist_cnn")
REWRITE = "REWRITE=1 tests/simgpu/run pytest -n 0 lightbase/tests/test_gpu_counts.py"
BEGIN, END = "<!-- counted by test_gpu_counts.py -->\n", "<!-- end of the counts -->\n"
HEAD = """\
| | operations a step | more in a log step | copies: step, log step | waits: both, checkpoint |
|---|---|---|---|---|
"""
MOST_IN_LOG_STEP = 20  # operations

Counts = dict[str, int]


@pytest.fixture
def counted(
    mnist_dir: Path, cifar10_dir: Path, tmp_path: Path
) -> dict[str, dict[str, Any]]:
    """By config: what gpu_counts.py prints."""
    if "SIMGPU_FOLDER" not in os.environ:
        pytest.skip("only a simulated GPU counts")
    environment = os.environ | {"SIMGPU_TRACE": "1", "OMP_NUM_THREADS": "1"}
    runs = {}
    for name in CONFIGS:
        if (config := REPO / "configs" / f"{name}.yaml").exists():
            command = [
                sys.executable,
                gpu_counts.__file__,
                config,
                mnist_dir,
                tmp_path / name,
            ]
            options: dict[str, Any] = {"stdout": subprocess.PIPE, "env": environment}
            runs[name] = programs.start(command, cwd=REPO, **options)
    outputs = {name: run.communicate(timeout=200)[0] for name, run in runs.items()}
    return {
        name: json.loads(output.splitlines()[-1]) for name, output in outputs.items()
    }


def total(counts: Counts, kind: str) -> int:
    return sum(number for name, number in counts.items() if name.startswith(kind))


def ordinary_and_log_steps(steps: list[Counts]) -> tuple[list[Counts], list[Counts]]:
    ordinary = [step for i, step in enumerate(steps, 1) if i % gpu_counts.EVERY]
    return ordinary, steps[gpu_counts.EVERY - 1 :: gpu_counts.EVERY]


def operations(steps: list[Counts]) -> tuple[int, int]:
    """Of an ordinary step, and how many more of a log step."""
    ordinary, log_steps = ordinary_and_log_steps(steps)
    ((usual, _),) = Counter(total(step, "operation") for step in ordinary).most_common(
        1
    )
    return usual, max(total(step, "operation") for step in log_steps) - usual


def row(name: str, steps: list[Counts], checkpoint: Counts) -> str:
    parts = ordinary_and_log_steps(steps)
    usual, more = operations(steps)
    copies, waits = (
        [max(total(x, kind) for x in y) for y in parts] for kind in ("copy", "wait")
    )
    waits.append(total(checkpoint, "wait"))
    lists = " | ".join(", ".join(map(str, numbers)) for numbers in (copies, waits))
    return f"| `{name}.yaml` | {usual} | {more} | {lists} |\n"


def test_the_table_is_what_is_counted(counted: dict[str, Any]) -> None:
    rows = [row(name, **counts) for name, counts in counted.items()]
    if not rows or not PAGE.exists():
        pytest.skip("the repository has other experiments, or another page")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    if os.environ.get("REWRITE"):
        table = HEAD + "".join(rows)
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}")
    missing = [line for line in rows if line not in table]
    assert not missing, f"docs/{PAGE.name} has other counts: {REWRITE}"


def test_only_a_log_step_waits_and_once(counted: dict[str, Any]) -> None:
    for name, counts in counted.items():
        steps = counts["steps"]
        ordinary, log_steps = ordinary_and_log_steps(steps)
        assert len(log_steps) == 3
        assert not [(name, step) for step in ordinary if total(step, "wait")]
        assert not [(name, step) for step in log_steps if total(step, "wait") != 1]
        assert not [
            (name, step) for step in steps if any("pageable" in kind for kind in step)
        ]
        assert operations(steps)[1] <= MOST_IN_LOG_STEP, name
        assert total(counts["checkpoint"], "wait") <= 1, name


def saved(tmp_path: Path, device: str, is_tied: bool) -> dict[str, Any]:
    """A checkpoint of a network after two steps, read without telling where to."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4, False)
    )
    if is_tied:
        net.append(nn.Linear(4, 4, False))
        net[4].weight = net[3].weight
    net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    optimizer.step()
    content = {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }
    AtomicCheckpointIO().save_checkpoint(content, tmp_path / f"{device}.ckpt")
    return torch.load(
        tmp_path / f"{device}.ckpt", map_location="cpu" if is_tied else None
    )  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_of_a_gpu_is_that_of_a_cpu(tmp_path: Path, is_tied: bool) -> None:
    one, other = (saved(tmp_path, device, is_tied) for device in ("cuda", "cpu"))
    states = one["state_dict"], other["state_dict"]
    assert states[0]._metadata == states[1]._metadata
    for parts in (states, (one["optimizer_states"], other["optimizer_states"])):
        tensors, expected = map(tensors_in, parts)
        assert len(tensors) == len(expected) > 0
        for a, b in zip(tensors, expected, strict=True):
            assert (a.device.type, a.dtype, a.stride()) == ("cpu", b.dtype, b.stride())
            torch.testing.assert_close(a, b)
    shared = [len({x.data_ptr() for x in state.values()}) for state in states]
    assert shared[0] == shared[1] == len(states[0]) - is_tied


@pytest.mark.parametrize(
    "most", [metrics.MAX_NUMBERS, 40], ids=["on the CPU", "on the GPU"]
)
def test_metrics_of_a_gpu_have_the_values_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """`most` numbers wait for a transfer to the CPU; more are never taken there."""
    monkeypatch.setattr(metrics, "MAX_NUMBERS", most)

    def values(device: str) -> dict[str, float]:
        accuracy = {"acc": MulticlassAccuracy(3, average="macro", validate_args=False)}
        epoch = Accumulator(MetricCollection(accuracy))
        means = Accumulator(MetricCollection(accuracy).clone())
        means.epoch = epoch
        generator = torch.Generator().manual_seed(0)
        for size in (5, 20, 5):  # the second is many, and finds sums on the CPU
            outputs = torch.rand(size, 3, generator=generator).to(device)
            targets = torch.randint(3, (size,), generator=generator).to(device)
            means.add(size, {"loss": outputs.mean()}, outputs, targets)
            means.result(lambda sums: sums)
            means.reset()
        assert epoch.sums is not None
        assert epoch.sums.is_cuda == (device == "cuda" and most == 40)
        return {name: float(x) for name, x in epoch.result(lambda sums: sums).items()}

    assert values("cuda") == pytest.approx(values("cpu"), rel=1e-6)


@pytest.mark.parametrize(
    ("at_batch", "value", "step"), [(25, "nan", 30), (36, "inf", 38)]
)
def test_an_infinite_loss_ends_a_run_on_a_gpu(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    at_batch: int,
    value: str,
    step: int,
) -> None:
    monkeypatch.setattr("test_finite.Breaks.at_batch", at_batch)
    monkeypatch.setattr("test_finite.Breaks.value", float(value))
    flags = "--model test_finite.Breaks --trainer.accelerator gpu --trainer.log_every_n_steps 5"
    with pytest.raises(SystemExit):
        train(flags, "--trainer.max_epochs 4")
    assert f"NaN or infinite after step {step}, in epoch 2" in capsys.readouterr().err
