"""What Lightning, torch and matplotlib say and need not; and that other words get
through."""

import warnings

import pytest

from lightbase.compat import quiet_lightning

STRIDES = """Grad strides do not match bucket view strides. This may indicate grad was not created according to the
grad.sizes() = [16, 8, {0}, {0}], strides() = [8, 1, 8, 8]
bucket_view.sizes() = [16, 8, {0}, {0}], strides() = [8, 1, 1, 1] (Triggered internally at reducer.cpp:337.)"""


def test_known_warnings_of_gpus_are_left_out():
    texts = [
        "The AccumulateGrad node's stream does not match the stream of the node that",
        "TensorFloat32 tensor cores for float32 matrix multiplication available but",
        STRIDES.format(1),
    ]
    quiet_lightning()
    for text in texts:
        warnings.warn(text, stacklevel=1)
    with pytest.raises(UserWarning):  # real ones
        warnings.warn(STRIDES.format(3), stacklevel=1)
