"""The state of the random generators, of which a resumed run needs all to draw what it would have
drawn."""

import random
from typing import Any

import numpy as np
import torch


def random_state(gpus: list[torch.device]) -> dict[str, Any]:
    name, key, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus],
        "python": random.getstate(),
        "numpy": [
            name,
            torch.tensor(np.asarray(key, dtype=np.int64)),
            *rest,
        ],  # safe loading knows tensors, no arrays
    }


def restore_random_state(state: dict[str, Any], gpus: list[torch.device]) -> None:
    torch.set_rng_state(state["torch"])
    for gpu, gpu_state in zip(gpus, state["cuda"], strict=False):  # it may have been another number
        torch.cuda.set_rng_state(gpu_state, gpu)
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
