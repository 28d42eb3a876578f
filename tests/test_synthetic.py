import pytest
import torch

SyntheticImages = pytest.importorskip("project.data.synthetic").SyntheticImages


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (4, 9, 17)])
def test_synthetic_images_are_seeded_and_of_any_shape(
    shape: tuple[int, int, int],
) -> None:
    options = {"image_shape": shape, "num_classes": 3, "num_train": 30, "num_test": 30}
    images, targets = SyntheticImages(**options).load("train")
    assert images.shape == (30, *shape)
    assert images.dtype == torch.uint8
    assert set(targets.tolist()) == {0, 1, 2}
    assert torch.equal(images, SyntheticImages(**options).load("train")[0])
    assert not torch.equal(images, SyntheticImages(**options).load("test")[0])
    assert not torch.equal(
        images, SyntheticImages(data_seed=1, **options).load("train")[0]
    )
