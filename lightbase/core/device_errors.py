"""Errors of devices and drivers in two lines: the problem and the way out.

`WAYS_OUT` lists the errors of torch that are known, and `short_device_errors` turns
them into a UserError.
"""

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Iterator

import torch

from lightbase.core.errors import UserError, say

OTHER_TORCH = "another torch (docs/install.md#with-an-older-nvidia-driver)"
AGAIN = "start again, after the first epoch with --ckpt_path last"
GPU_FAILED = "unspecified launch failure|ECC error"
WAYS_OUT = {
    "busy or unavailable": "another program may use the GPU alone (nvidia-smi); choose "
    "another one with --trainer.devices [1], or use --trainer.accelerator cpu",
    "out of memory|allocate memory": "another program may use the memory (nvidia-smi); "
    "else try a smaller --data.batch_size, --trainer.precision bf16-mixed or "
    "--data.resident false",
    "NVIDIA driver": f"torch {torch.__version__} is built for CUDA "
    f"{torch.version.cuda}: install another driver or {OTHER_TORCH}, or use "
    "--trainer.accelerator cpu",
    "no kernel image": "the GPU is older than torch's kernels: install "
    f"{OTHER_TORCH}, or use --trainer.accelerator cpu",
    "device-side assert": "an index is out of range, such as a target or a token: "
    "--trainer.accelerator cpu says which",
    GPU_FAILED: f"nvidia-smi and dmesg may tell why it fails; {AGAIN}",
    "remote process exit|by peer": "another process has ended, its lines may tell why; "
    f"{AGAIN}",
    "Too many open files|shared memory": "the workers need it: try fewer "
    "--data.num_workers, such as 0, or raise the limit (ulimit -n, size of /dev/shm)",
    r"C(?:\+\+)? compiler": "install gcc and g++, or leave --model.compile_net out",
}
"""What the user can do, by a pattern in an error of torch."""


@contextlib.contextmanager
def short_device_errors() -> Iterator[None]:
    """Within this context, turn an error of torch that WAYS_OUT lists into a UserError:
    full memory, a missing compiler, too few files for the workers, a GPU that is too
    old or has failed, a wrong NVIDIA driver.

    Such an error may come from any call that uses a device, so this context is around
    the whole run. Other errors are raised as they are. The problem is the first
    sentence of the last line that matches: links and advice on torch's allocator follow
    it.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        for pattern, way_out in WAYS_OUT.items():
            if lines := re.findall(f".*(?:{pattern}).*", str(error)):
                # "Tried to allocate" and "DefaultCPUAllocator" belong to the problem
                problem = re.split(r"\. (?!Tried|DefaultCPU)", lines[-1].strip())[0]
                if pattern == GPU_FAILED:
                    atexit.register(end_at_once)
                raise UserError(problem, way_out) from error
        raise


def end_at_once() -> None:
    """End the process with status 1 before torch frees the tensors of a GPU that has
    failed. Freeing them would abort Python, after the two lines of the error. `atexit`
    calls this function."""
    sys.stdout.flush()
    os._exit(1)


def start_cuda(accelerator: str) -> None:
    """Start CUDA, before anything uses a GPU. If there is none, nothing happens.

    accelerator: The Trainer's flag. With "auto", a driver that is too old for torch is
        no error: two lines say that no GPU is used, and CUDA_VISIBLE_DEVICES hides the
        GPUs from NVML, which counts them even if torch cannot use them.

    Raise UserError if the driver is too old and the flag asks for a GPU.
    """
    try:
        with short_device_errors():
            torch.cuda.init()
    except (RuntimeError, UserError) as error:  # it is raised without a GPU, too
        if "too old" not in str(error):
            return
        if accelerator != "auto":
            raise
        say(f"No GPU is used: {error}")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
