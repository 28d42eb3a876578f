import pytest
import torch
from torch.nn.functional import pad
from torchvision.transforms import v2

from lightbase.data.transforms import alternating_flip, crop_and_flip, to_float


def images(num: int = 50) -> torch.Tensor:
    return torch.randint(0, 256, (num, 3, 9, 9), dtype=torch.uint8)


def test_to_float_is_torchvisions_scaling_and_normalisation() -> None:
    x = images()
    scaled = v2.ToDtype(torch.float32, scale=True)(x)
    torch.testing.assert_close(to_float(x), scaled)
    expected = v2.Normalize([0.5], [0.25])(scaled)
    torch.testing.assert_close(to_float(x, 0.5, 0.25), expected)


def test_two_epochs_show_each_image_both_ways_and_about_half_mirrored() -> None:
    x = images(400)
    first, second = alternating_flip(x, 0), alternating_flip(x, 1)
    is_same = (first == x).flatten(1).all(1)
    assert torch.equal(first[~is_same], x[~is_same].flip(-1))
    assert torch.equal(second, first.flip(-1))
    assert 150 < is_same.sum() < 250
    # whatever batch an image comes in
    assert torch.equal(alternating_flip(x[7:9], 2), first[7:9])
    with pytest.raises(ValueError, match="uint8"):
        alternating_flip(x / 255, 0)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [(torch.contiguous_format, "constant"), (torch.channels_last, "reflect")],
)
def test_the_random_numbers_choose_what_they_always_chose(layout, mode):
    """The same shift and the same side for each image as from the first version on: a
    seed's training repeats. A crop is a window of the padded image."""
    x = images().float().contiguous(memory_format=layout)
    torch.manual_seed(0)
    changed = crop_and_flip(x, 2, True, mode)
    torch.manual_seed(0)
    parts = zip(pad(x, [2] * 4, mode), *torch.randint(5, (2, 50)), strict=True)
    crops = torch.stack([image[:, t : t + 9, i : i + 9] for image, t, i in parts])
    is_flipped = torch.rand(50, 1, 1, 1) < 0.5
    assert torch.equal(changed, torch.where(is_flipped, crops.flip(-1), crops))
    assert changed.is_contiguous()
    assert crop_and_flip(x, 0, False) is x
