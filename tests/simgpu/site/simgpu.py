"""The simulated GPU in Python. `import torch` calls install() in every process by itself: this
folder is on PYTHONPATH, and simgpu-1.dist-info names install() under the entry point
torch.backends.

counts() and reset_counts() are for tests: what has been counted with SIMGPU_TRACE=1, for example
{"operation aten::mm": 2, "copy pageable to device": 1, "wait cudaStreamSynchronize": 1}.
"""

import ctypes
import os
from pathlib import Path


def install() -> None:
    """Put the computing operations in place of torch's CUDA kernels."""
    if not hasattr(ctypes.CDLL(None), "simgpu_counts"):
        return  # its library is not preloaded
    ctypes.CDLL(str(Path(os.environ["SIMGPU_FOLDER"], "operations.so"))).simgpu_install()


def counts() -> dict[str, int]:
    library = ctypes.CDLL(None)
    library.simgpu_counts.restype = ctypes.c_char_p
    pairs = (line.split(" ", 1) for line in library.simgpu_counts().decode().splitlines())
    return {name: int(number) for number, name in pairs}


def reset_counts() -> None:
    ctypes.CDLL(None).simgpu_reset_counts()
