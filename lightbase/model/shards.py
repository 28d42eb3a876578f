"""A checkpoint whose sharded tensors lie in a folder beside its file.

last.ckpt names the folder last.shards/N, which `torch.distributed.checkpoint` writes: a
safetensors file for each process. In last.ckpt itself, an empty tensor of the device
"meta" keeps the place of each of them. A later last.ckpt names another folder, so a
file and its folder always belong together, whenever a process is killed.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightbase.compat import flattened
from lightbase.config.errors import UserError
from lightbase.config.spec import entries
from lightbase.data.tensors import map_tensors

# what to do if a checkpoint does not fit on the disk
MAKE_ROOM = "make room, then start again, or continue with --ckpt_path last"


def save_shards(checkpoint: Any, path: Path, number: int) -> Any:
    """Write the DTensors of a checkpoint into its folder of this number. Return the
    rest, for the file `path`. All processes call this.

    Raise UserError in all of them if one cannot write.
    """
    shards = {
        name: value
        for name, value in flattened(checkpoint).items()
        if isinstance(value, DTensor)
    }
    folder = shards_of(path) / str(number)
    try:
        dcp.save(
            shards,
            storage_writer=dcp.HuggingFaceStorageWriter(
                str(folder), save_distributed=True
            ),
        )
    except dcp.CheckpointException as error:
        shutil.rmtree(folder, ignore_errors=True)  # all processes try it at once
        (failure, _), *_ = error.failures.values()
        raise UserError(
            f"{path} cannot be written: {failure}; what was saved before is whole",
            MAKE_ROOM,
        ) from failure
    return map_tensors(without_values, checkpoint) | {
        "shards": number,
        "shard_sums": byte_sums(shards),
    }


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the device "meta" in place of a DTensor."""
    if isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor


def load_shards(content: Any, path: Path, empty: Any = torch.empty) -> Any:
    """Return the content of a file with the tensors in its folder, if it has one.

    empty: Makes the tensors that are filled, from a shape and a `dtype`. They may be
        DTensors: each process reads its own shards, and all call this.
    Raise UserError if the folder is missing, or not as it was written.
    """
    if not isinstance(entries(content).get("shards"), int):
        return content
    shards, filled = {}, {}
    for name, value in flattened(content).items():
        if torch.is_tensor(value) and value.is_meta:
            shards[name] = empty(value.shape, dtype=value.dtype)
            filled[id(value)] = shards[name]
    folder = shards_of(path.resolve()) / str(content["shards"])  # it may be a link
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        reader.read_metadata()  # of its error, `load` would log a traceback
        dcp.load(shards, storage_reader=reader, no_dist=True)
    except (Exception, dcp.CheckpointException) as error:
        # safetensors' errors have no other base class
        raise UserError(
            f"{folder} cannot be read: {str(error).splitlines()[-1]}",
            "a checkpoint and its folder .shards belong together: copy both",
        ) from error
    if byte_sums(shards) != content["shard_sums"]:
        raise UserError(f"{folder} is damaged or incomplete")
    return map_tensors(lambda x: filled.get(id(x), x), content)


def shards_of(path: Path) -> Path:
    """Return the folder that holds the folders of shards of a checkpoint."""
    return path.with_name(path.name.removesuffix(".ckpt") + ".shards")


def remove_shards(path: Path, keep: Any = None) -> None:
    """Remove the folders of shards of a checkpoint, except the one of this number."""
    for folder in shards_of(path).glob("*"):
        if folder.name.isdecimal() and folder.name != str(keep):
            shutil.rmtree(folder, ignore_errors=True)  # the next time it is tried again


def byte_sums(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return {name: int64 ()}: the sum of all bytes of each tensor. Sums of integers
    are exact, so they do not depend on the layout in memory, the device or the number
    of processes. Nothing waits for a GPU.

    tensors: Of DTensors, the sum is that of all shards: all processes call this.
    """
    sums, sharded = {}, []
    for name, value in tensors.items():
        if isinstance(value, DTensor):
            if any(place.is_shard() for place in value.placements):
                sharded.append(name)  # the others are whole on each process
            value = value.to_local()
        sums[name] = value.detach().flatten().view(torch.uint8).sum()
    if sharded:
        parts = torch.stack([sums[name] for name in sharded])
        dist.all_reduce(parts)
        sums |= dict(zip(sharded, parts, strict=True))
    return sums
