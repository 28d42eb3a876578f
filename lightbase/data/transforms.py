"""The batch transforms under their path of version 0.3. Use `lightbase` instead."""

from lightbase.core.images import (
    alternating_flip,
    crop_and_flip,
    flip_where,
    random_crop,
    random_flip,
    to_float,
)

__all__ = [
    "alternating_flip",
    "crop_and_flip",
    "flip_where",
    "random_crop",
    "random_flip",
    "to_float",
]
