import importlib

import pytest
import torch
from torchvision.transforms import v2

import lightbase
from lightbase import (
    alternating_flip,
    crop_and_flip,
    random_crop,
    random_flip,
    to_float,
)


def test_the_path_of_version_0_3_has_the_same_functions() -> None:
    older = importlib.import_module("lightbase.data.transforms")
    for name in older.__all__:
        assert getattr(older, name) is getattr(lightbase, name)


def images(num: int = 50, channels: int = 3, size: int = 9) -> torch.Tensor:
    return torch.randint(0, 256, (num, channels, size, size), dtype=torch.uint8)


def test_to_float_is_torchvisions_scaling_and_normalisation() -> None:
    x = images()
    reference = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]
    )
    torch.testing.assert_close(to_float(x, 0.5, 0.25), reference(x))
    assert to_float(x).min() >= 0
    assert to_float(x).max() <= 1


@pytest.mark.parametrize(
    ("padding", "mode"), [(1, "constant"), (4, "constant"), (2, "reflect")]
)
def test_a_crop_is_a_window_of_the_padded_image_and_every_shift_happens(padding, mode):
    torch.manual_seed(0)  # one of the 81 shifts may be missing otherwise
    x = images(1200, size=6)
    crops = random_crop(x, padding, mode)  # type: ignore[arg-type]
    assert crops.shape == x.shape
    assert crops.dtype == x.dtype
    padded = torch.nn.functional.pad(x.float(), [padding] * 4, mode).byte()
    shifts = range(2 * padding + 1)
    windows = torch.stack(
        [padded[:, :, t : t + 6, left : left + 6] for t in shifts for left in shifts]
    )
    found = (windows == crops).flatten(2).all(2)  # (shifts, images)
    assert found.any(0).all()
    assert found.any(1).all()


def test_two_epochs_show_each_image_both_ways_and_about_half_mirrored() -> None:
    x = images(400)
    first, second, third = (alternating_flip(x, epoch) for epoch in range(3))
    is_same = (first == x).flatten(1).all(1)
    assert torch.equal(first, torch.where(is_same[:, None, None, None], x, x.flip(-1)))
    assert torch.equal(second, first.flip(-1))
    assert torch.equal(third, first)
    assert 150 < is_same.sum() < 250
    # whatever batch an image comes in
    assert torch.equal(alternating_flip(x[7:9], 0), first[7:9])
    with pytest.raises(ValueError, match="uint8"):
        alternating_flip(x / 255, 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_random_numbers_choose_what_they_always_chose(dtype, layout):
    """The same shift and the same side for each image as from the first version on: a
    seed's training repeats."""
    x = images(30).to(dtype).contiguous(memory_format=layout)
    torch.manual_seed(0)
    crops, flipped = random_crop(x, 2), random_flip(x)
    torch.manual_seed(0)
    top, left = torch.randint(5, (2, 30))
    padded = torch.nn.functional.pad(x, [2] * 4)
    expected = [
        image[:, t : t + 9, i : i + 9]
        for image, t, i in zip(padded, top, left, strict=True)
    ]
    assert torch.equal(crops, torch.stack(expected))
    assert crops.is_contiguous()
    assert torch.equal(
        flipped, torch.where(torch.rand(30, 1, 1, 1) < 0.5, x.flip(-1), x)
    )


def test_crop_and_flip_happen_if_they_are_chosen() -> None:
    x = images()
    assert crop_and_flip(x, 0, False) is x
    torch.manual_seed(0)
    expected = random_flip(random_crop(x, 2))
    torch.manual_seed(0)
    assert torch.equal(crop_and_flip(x, 2, True), expected)
