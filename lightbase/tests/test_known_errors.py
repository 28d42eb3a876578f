"""The table of other packages' errors: real errors, and similar ones of the user."""

import os
import pickle
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import default_collate

from lightbase.config.known_errors import KNOWN, known, lines_of

X = torch.zeros(2, 3, 4, 4)


def in_place() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


def other_optimizer() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    state = torch.optim.SGD(weights).state_dict()
    torch.optim.SGD(weights[:1]).load_state_dict(state)


def raises(error: Exception) -> Any:
    def function() -> None:
        raise error

    return function


OUTPUTS, CLASSES = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
TOO_OLD = "The NVIDIA driver on your system is too old (found version 1). Please update"
MEMORY = "CUDA out of memory. Tried to allocate 1 TiB. GPU 0 has 2 GiB. See PYTORCH_"
COMPILER = "In a subprocess:\n  RuntimeError: Failed to find C compiler. Please specify"
WORKER = (
    "DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that "
)
WORKER += "dataloader's workers are out of shared memory"
FAILED = "CUDA error: unspecified launch failure"

# how the error is made, the end of the problem, and a part of the way out
REAL = [
    (raises(RuntimeError(MEMORY)), "allocate 1 TiB", "data.batch_size"),
    (lambda: torch.empty(10**15), "", "data.batch_size"),
    (raises(RuntimeError(TOO_OLD)), "1)", "another driver"),
    (raises(RuntimeError("device-side assert triggered")), "", "out of range"),
    (raises(RuntimeError(FAILED)), "", "dmesg"),
    (raises(RuntimeError("Connection closed by peer [::1]")), "", "another process"),
    (raises(RuntimeError(WORKER)), "", "data.num_workers"),
    (raises(OSError(24, "Too many open files")), "", "data.num_workers"),
    (raises(RuntimeError(COMPILER)), "C compiler", "gcc"),
    (lambda: __import__("scipy.gone"), "No module named 'scipy.gone'", "[tools]"),
    (raises(ModuleNotFoundError("No module named 'optuna'")), "", "[sweep]"),
    (raises(ModuleNotFoundError("No module named 'onnxscript'")), "", "[export]"),
    (raises(URLError("no network")), "", "with a network"),
    (raises(HTTPError("http://x", 404, "Not Found", {}, None)), "", "download"),  # type: ignore[arg-type]
    (raises(OSError(28, os.strerror(28))), "", "make room"),
    (raises(PermissionError(13, "Permission denied")), "", "permissions"),
    (lambda: Path().read_text(), "", "another file or folder"),
    (lambda: Path("nowhere").read_text(), "'nowhere'", "exists"),
    (raises(MisconfigurationException("clip")), "clip", ""),
    (raises(RuntimeError("Early stopping conditioned on metric `a`")), "`a`", ""),
    (raises(TypeError("you are required to override the `configure_model()`")), "", ""),
    (lambda: nn.Linear(12, 2)(X), "", "x.flatten(1)"),
    (lambda: nn.Conv2d(3, 4, 1)(X.transpose(1, 3)), "", "channels come first"),
    (lambda: nn.Conv2d(3, 4, 1)(X.byte()), "", "to_float"),
    (lambda: nn.Linear(4, 2)(X.double()), "", "x.float()"),
    (lambda: nn.Linear(4, 2)(X, X), "", "def forward(self, x)"),
    (lambda: nn.CrossEntropyLoss()(OUTPUTS, CLASSES[:, None]), "", "class numbers"),
    (lambda: nn.CrossEntropyLoss()(OUTPUTS, CLASSES + 9), "", "from 0 to C - 1"),
    (lambda: nn.CrossEntropyLoss()(OUTPUTS, OUTPUTS.long()), "", "class numbers"),
    (lambda: nn.BCEWithLogitsLoss()(OUTPUTS, CLASSES), "", "both in one shape"),
    (lambda: nn.NLLLoss()(OUTPUTS, CLASSES.float()), "", "class numbers"),
    (lambda: X + X[:, :2], "", "print the shapes"),
    (torch.ones(2, requires_grad=True).backward, "", ".mean()"),
    (in_place, "", "y = y + 1"),
    (lambda: default_collate([X[0], X[:, 0]]), "", "one shape"),
    (lambda: default_collate([object()]), "", "`collate`"),
    (other_optimizer, "", "--model.weights"),
]


def test_each_entry_has_a_real_error_and_gives_its_way_out():
    entries = set()
    for fails, end, way_out in REAL:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            fails()
        found = known(caught.value)
        assert found, caught.value
        problem, entry = found
        entries.add(entry)
        assert way_out in entry.way_out
        assert problem
        assert problem.endswith(end)
        assert "\n" not in problem
        lines, status = lines_of(caught.value)
        assert (lines[0], status) == (problem, entry.status)
        assert any(line.startswith(f"in {__file__}, line ") for line in lines)
    assert entries == set(KNOWN)


Q = torch.zeros(3, 4)

# errors in the user's code that look alike
OTHERS = [
    raises(RuntimeError("Found no NVIDIA driver on your system. Please check")),
    raises(ConnectionResetError(104, "Connection reset by peer")),
    raises(ValueError("out of memory")),
    lambda: Q.double() @ Q.T,  # such as a mask in float64
    lambda: torch.zeros(2).backward(),
    lambda: nn.Module().layer,
    lambda: pickle.loads(b"x"),
    lambda: nn.Linear(2, 2).load_state_dict({}),
]


@pytest.mark.parametrize("fails", OTHERS)
def test_a_similar_error_gets_no_way_out(fails):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fails()
    assert known(caught.value) is None
    caught.value.add_note("a note")
    assert lines_of(caught.value) == ([], 1)  # its traceback has a line of the user
    lines, _ = lines_of(caught.value.with_traceback(None))
    assert lines[1] == "a note"
