import time

import pytest
import torch

SyntheticImages = pytest.importorskip("project.data.synthetic").SyntheticImages


@pytest.mark.slow
def test_synthetic_images_are_seeded_and_quickly_made() -> None:
    start = time.perf_counter()
    images, targets = SyntheticImages().load("train")
    assert time.perf_counter() - start < 10  # about one second on two free cores
    assert images.shape == (20_000, 3, 32, 32)
    assert images.dtype == torch.uint8
    again, _ = SyntheticImages(num_train=20_000).load("train")
    assert torch.equal(images, again)
    assert targets.bincount().min() > 1_500
    other, _ = SyntheticImages(data_seed=1, num_train=100).load("train")
    assert not torch.equal(images[:100], other)
    test, _ = SyntheticImages(num_test=100).load("test")
    assert not torch.equal(images[:100], test)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (4, 9, 17)])
def test_synthetic_images_of_any_shape(shape: tuple[int, int, int]) -> None:
    images, targets = SyntheticImages(image_shape=shape, num_classes=3, num_train=30).load("train")
    assert images.shape == (30, *shape)
    assert set(targets.tolist()) == {0, 1, 2}
