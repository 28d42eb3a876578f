import pytest
import torch

Discs = pytest.importorskip("project.data.discs").Discs


def test_discs_are_seeded_and_their_area_tells_their_radius() -> None:
    data = Discs(num_train=200, num_test=200, noise=0)
    images, radius = data.load("train")
    assert images.shape == (200, 1, 32, 32)
    assert images.dtype == torch.uint8
    assert 3 <= radius.min() < radius.max() <= 12
    brightest = images.flatten(1).amax(1)
    assert brightest.min() >= 76
    area = images.flatten(1).sum(1) / brightest
    torch.testing.assert_close((area / torch.pi).sqrt(), radius, atol=0.1, rtol=0)
    assert torch.equal(images, data.load("train")[0])
    assert not torch.equal(images, data.load("test")[0])
