import pytest
import torch

SyntheticImages = pytest.importorskip("project.data.synthetic").SyntheticImages


@pytest.mark.parametrize("shape", [(1, 28, 28), (4, 9, 17)])
def test_synthetic_images_are_seeded_and_of_any_shape(shape) -> None:
    options = {"image_shape": shape, "num_classes": 3, "num_train": 30, "num_test": 30}
    data = SyntheticImages(**options)
    images, targets = data.load("train")
    assert images.shape == (30, *shape)
    assert images.dtype == torch.uint8
    assert set(targets.tolist()) == {0, 1, 2}
    assert torch.equal(images, data.load("train")[0])
    other = SyntheticImages(data_seed=1, **options)
    for another, _ in (data.load("test"), other.load("train")):
        assert not torch.equal(images, another)
