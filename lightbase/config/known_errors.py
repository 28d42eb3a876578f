"""Errors of other packages, and what to do about them: the only file that reads the
messages of torch, Lightning and Python. Like errors.py, it is imported before torch, so
the table `KNOWN` has the names of classes.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from lightbase.config.errors import UserError, first_line, own_line

FIT_LOSS = (
    "cross-entropy takes outputs (N, C) and class numbers int64 (N,) from 0 to C - 1 "
    "(argmax(1) of one-hot targets, targets[:, 0] of (N, 1)); most other losses take "
    "both in one shape"
)

AGAIN = "start again, after the first epoch with --ckpt_path last"

OTHER_TORCH = "another torch (docs/install.md#with-an-older-nvidia-driver)"


class Known(NamedTuple):
    """An error of another package.

    kind: The name of its class or of a base class.
    pattern: A regular expression. Its match is printed as the problem.
    way_out: What the user can do; "" if the message says it.
    status: Exit status of the script.
    """

    kind: str
    pattern: str
    way_out: str
    status: int = 1


KNOWN = [
    # devices, drivers and processes
    Known(
        "RuntimeError",
        # without the advice on torch's allocator
        r".*(?:out of memory|allocate memory)(?:(?!\. (?:GPU|Of the|If)).)*",
        "another program may use the memory (nvidia-smi); else try a smaller "
        "--data.batch_size, --trainer.precision bf16-mixed or --data.resident false",
    ),
    Known(
        "RuntimeError",
        ".*NVIDIA driver on your system is too old[^.]*",
        f"install another driver or {OTHER_TORCH}, or use --trainer.accelerator cpu",
    ),
    Known(
        "RuntimeError",
        ".*device-side assert.*",
        "an index is out of range, such as a target or a token: --trainer.accelerator "
        "cpu says which",
    ),
    Known(
        "RuntimeError",
        ".*(?:unspecified launch failure|ECC error).*",
        f"nvidia-smi and dmesg may tell why it fails; {AGAIN}",
    ),
    Known(
        "RuntimeError",
        ".*(?:remote process exit|by peer).*",
        f"another process has ended, its lines may tell why; {AGAIN}",
    ),
    Known(
        "RuntimeError|OSError",
        ".*(?:Too many open files|out of shared memory|shared memory(?: object|\\()).*",
        "the workers need it: try fewer --data.num_workers, such as 0, or raise the "
        "limit (ulimit -n, size of /dev/shm)",
    ),
    Known(
        "RuntimeError",
        r".*C(?:\+\+)? compiler[^.\n]*",
        "install gcc and g++, or leave --model.compile_net out",
    ),
    Known(
        "ModuleNotFoundError",
        "No module named '(?:scipy|sklearn|psutil|pynvml).*",
        'pip install -c constraints.txt -e ".[tools]"',
    ),
    Known(
        "ModuleNotFoundError",
        ".*optuna.*",
        'pip install -c constraints.txt -e ".[sweep]"',
    ),
    Known(
        "ModuleNotFoundError",
        ".*onnx.*",
        'pip install -c constraints.txt -e ".[export]"',
    ),
    # the disk and the network
    Known("URLError", ".+", "a download failed: with a network, start again"),
    Known(
        "OSError",
        r"\[Errno (?:28|122|27)\].*",  # full, over quota, over a limit for files
        "make room or choose another folder, then start the command again; what was "
        "saved before is whole",
    ),
    Known(
        "OSError",
        r"\[Errno (?:1|13|21|30|36)\].*",  # not allowed, a folder, read-only, too long
        "give another file or folder, or change its permissions",
    ),
    Known("FileNotFoundError", ".+", "give the path of a file or folder that exists"),
    # flags that Lightning refuses in a training
    Known("MisconfigurationException", ".+", "", 2),
    Known(
        "ValueError|RuntimeError",
        "`val_check_interval`.*|Early stopping .*|You set `(?:devices|num_nodes)=.*",
        "",
        2,
    ),
    Known(
        "TypeError",
        ".*required to override the `configure_model.*",
        "docs/tasks/sharded.md has one",
        2,
    ),
    # layers
    Known(
        "RuntimeError",
        ".*shapes cannot be multiplied.*",
        "flatten each sample before a Linear layer (x.flatten(1)), or change the size "
        "of the layer or of what comes before it",
        2,
    ),
    Known(
        "RuntimeError",
        r".*expected input\[.*\] to have .* channels.*",
        "channels come first (N, C, H, W), see torch.permute; or change in_channels",
        2,
    ),
    Known(
        "RuntimeError",
        r".*Input type \(.*should be the same.*|.*must have the same dtype, but got "
        r"(?:Byte|Char|Int|Long|Double) and Float.*",
        "give the layer float32: `normalize` can return to_float(inputs, mean, std), "
        "and x.float() converts another tensor",
        2,
    ),
    Known(
        "TypeError",
        r".*forward\(\) (?:takes|missing|got).*",
        "a network is called with the inputs of a batch, def forward(self, x), and a "
        "loss with outputs and targets",
        2,
    ),
    # losses and gradients
    Known(
        "Exception",
        ".*(?:multi-target not supported|class probabilities|[Tt]arget dtype|Target "
        "size|1D target tensor|found dtype Long|scalar type Long|^Target .* is out of "
        "bounds).*",
        FIT_LOSS,
        2,
    ),
    Known(
        "RuntimeError",
        "The size of tensor a .* must match the size of tensor b.*",
        "print the shapes of both tensors; a loss such as MSELoss takes outputs and "
        "targets in one shape",
    ),
    Known(
        "RuntimeError",
        ".*only for scalar outputs",
        "a loss is one number for the batch: .mean(), or reduction='mean'",
        2,
    ),
    Known(
        "RuntimeError",
        ".*modified by an inplace operation(?:(?! Hint).)*",
        "write y = y + 1 in place of y += 1, and no relu_ or inplace=True there",
        2,
    ),
    # samples
    Known(
        "RuntimeError",
        "stack expects each tensor to be equal size.*",
        "give all samples one shape (resize, crop, pad), or write `collate`",
    ),
    Known(
        "TypeError",
        "default_collate: .*",
        "return tensors from load, or convert the samples, or write `collate`",
    ),
    # the state in a checkpoint
    Known(
        "ValueError",
        "loaded state dict .*",
        "the optimizer has changed since: a new run can begin with the weights, "
        "without --ckpt_path and with --model.weights FILE",
    ),
]


def known(error: BaseException) -> tuple[str, Known] | None:
    """Return the problem and the entry of an error, or None if it is not in the
    table."""
    names = {cls.__name__ for cls in type(error).__mro__}
    for entry in KNOWN:
        found = re.search(entry.pattern, str(error))
        if found and not names.isdisjoint(entry.kind.split("|")):
            return found[0].strip(), entry
    return None


def lines_of(error: Exception) -> tuple[list[str], int]:
    """Return the lines to print for an error of another package, and the exit status:
    the problem, the last line of the user's code, the notes, and the way out. There are
    none for an error in the user's code that is not in the table: its traceback says
    more."""
    found = known(error)
    place = own_line(error)
    notes = getattr(error, "__notes__", [])
    if found:
        problem, entry = found
        lines = [problem, place, *notes, entry.way_out]
        return [line for line in lines if line], entry.status
    if notes and not place:
        problem = f"{type(error).__name__}: {first_line(error)}"
        return [problem, *notes, "LIGHTBASE_TRACEBACK=1 shows its traceback"], 1
    return [], 1


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """Within this context, add a note, unless it is "", to each error that is not a
    UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if text:
            error.add_note(text)
        raise
