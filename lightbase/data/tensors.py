"""Tensors: of arrays, of image files, and in batches of any structure, which are a
tensor, or tuples, lists and dicts of tensors.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection, is_namedtuple
from PIL import Image, ImageOps
from torch import Tensor, nn

from lightbase.config.errors import UserError, first_line

Batch = Any
"""A batch: a tensor, or tuples, lists and dicts of tensors, also nested."""

NESTED = (Tensor, np.ndarray, tuple, dict)
"""A list with a value of these types is a structure. Other lists have numbers."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that Pillow may open. The content of a file decides, not its name. Other
formats are refused, because for some of them, such as EPS, Pillow runs other programs
(Ghostscript)."""

MODES = {1: "L", 3: "RGB"}
"""{number of channels: Pillow's name of the mode}."""

IMAGE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    Image.DecompressionBombError,
)
"""The errors that Pillow raises for a file that is damaged or not an image."""


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return `values`, of any structure, with each tensor replaced by the function's
    result."""
    return apply_to_collection(values, Tensor, function)


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors in `values`, which may have any structure, in their order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, values)
    return tensors


def to_host(values: Any) -> Any:
    """Return `values`, of any structure, with all tensors on the CPU. `tensor.cpu()`
    would wait for the GPU once for each tensor. Here the copies are queued, to
    page-locked memory, and the host waits only once for each GPU."""
    moved = map_tensors(lambda x: x.to("cpu", non_blocking=x.is_cuda), values)
    for device in {x.device for x in tensors_in(values) if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def as_tensors(values: Any) -> Any:
    """Return `values` with arrays, numbers and lists of numbers converted to tensors,
    and whatever else NumPy reads, such as a table of pandas. Tuples and dicts keep
    their structure. A list that holds tensors, arrays, tuples or dicts becomes a tuple.
    """
    if isinstance(values, dict):
        return {key: as_tensors(value) for key, value in values.items()}
    if isinstance(values, list) and any(isinstance(part, NESTED) for part in values):
        values = tuple(values)
    if isinstance(values, tuple):
        return with_parts(values, *map(as_tensors, values))
    if np.ma.is_masked(values):
        raise UserError(
            f"load() returned an array of which {np.ma.count_masked(values):,} values "
            "are masked",
            "replace them, array.filled(VALUE), or leave these samples out",
        )
    try:
        if not isinstance(values, Tensor | list):
            values = native_array(np.asarray(values))
        return torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"load() must return numeric arrays: {error}",
            "text labels become numbers: the position of each label in `classes`",
        ) from error


def native_array(values: np.ndarray) -> np.ndarray:
    """Return the array as torch takes it. Others are copied: arrays with negative
    strides, of another byte order, or of objects."""
    if values.dtype == object:
        values = np.asarray(values.tolist())  # numbers, or texts
    if any(stride < 0 for stride in values.strides):
        values = values.copy()
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def plain_numbers(values: Any) -> Any:
    """Return `values`, of any structure, with the scalars of NumPy as numbers of
    Python: a checkpoint may hold no others."""
    return apply_to_collection(values, np.generic, np.generic.item)


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch: the first part of a tuple or list. Any other batch
    is the inputs itself."""
    if isinstance(batch, tuple | list) and batch:
        return batch[0]
    return batch


def targets_of(batch: Any) -> Any:
    """Return the targets of a batch: the second part of a tuple or list with two parts.
    Return None if the batch is not such a pair, or if both parts are uint8 images
    (N, C, H, W) of one shape."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return None
    inputs, targets = batch
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        is_uint8 = inputs.dtype == targets.dtype == torch.uint8
        if is_uint8 and inputs.shape == targets.shape and inputs.dim() > 3:
            return None  # such as two views; masks of this shape have to be int64
    return targets


def with_parts(batch: Any, *parts: Any) -> Any:
    """Return a tuple of the parts. If `batch` is a named tuple, the result has the same
    type."""
    if is_namedtuple(batch):
        return type(batch)(*parts)
    return parts


def convert_types(batch: Any, keeps_float64: bool = False) -> Any:
    """Return the batch with dtypes that networks and losses take. float64 becomes
    float32. Targets that are one tensor, see `targets_of`, become float32, or int64 if
    they are integers or bools. keeps_float64: Leave inputs of float64 as they are."""
    if not keeps_float64:
        batch = map_tensors(
            lambda x: x.float() if x.dtype == torch.float64 else x, batch
        )
    targets = targets_of(batch)
    if isinstance(targets, Tensor):
        dtype = torch.int64
        if targets.is_floating_point():
            dtype = torch.float32
        batch = with_parts(batch, batch[0], targets.to(dtype))
    return batch


def rows_of(values: Any, index: Tensor | None) -> Any:
    """Return `values` with the rows at these positions of each tensor, int64 (M,).
    Without an index all rows are returned, and nothing is copied."""
    if index is None:
        return values
    # index_select copies whole rows. For small images it is seven times as fast as
    # x[index].
    return map_tensors(lambda x: x.index_select(0, index), values)


def spread(num: int, count: int) -> Tensor:
    """Return at most `count` positions from 0 to num - 1, int64, with equal distances:
    the first samples could all have one class, because data may be sorted by class."""
    count = min(num, count)
    return torch.arange(count) * (num - 1) // max(count - 1, 1)


def at_least_float32(outputs: Tensor) -> Tensor:
    """Return the outputs of a network as float32 for the loss, if they are float16 or
    bfloat16, in which a loss would be inexact. float32 and float64 stay."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def for_network(inputs: Tensor, net: nn.Module) -> Tensor:
    """Return the inputs as float64 if a weight of the network is float64, as with
    precision 64-true. Otherwise they stay as they are; so do integers."""
    is_double = any(weight.dtype == torch.float64 for weight in net.parameters())
    if is_double and inputs.is_floating_point():
        return inputs.double()
    return inputs


def read_image(file: Path, shape: tuple[int, int, int]) -> Tensor:
    """Read an image file, of several frames or pages the first one. See `to_tensor`.
    Raise UserError with the reason, without the name of the file, if it is damaged or
    not an image."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return to_tensor(image, shape)
    except IMAGE_ERRORS as error:
        raise UserError(first_line(error)) from error


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """Return a Pillow image as uint8 of `shape`, (C, H, W), where C is 1 (grey) or 3
    (RGB).

    The image is rotated as its EXIF data says. Transparent parts become white. Numbers
    of 16 bits are scaled to [0, 255]. The proportions are not kept (bilinear).
    """
    channels, height, width = shape
    ImageOps.exif_transpose(image, in_place=True)
    image = as_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert(MODES[channels])
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(height, width, channels).permute(2, 0, 1)


def as_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits with 8 bits: Pillow would clip values above 255.
    Images of 8 bits stay."""
    if image.mode in ("I", "F"):
        raise UserError("it has numbers of 32 bits: convert it to 8 or 16 bits")
    if not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image) / 257
    return Image.fromarray(values.round().astype(np.uint8))
