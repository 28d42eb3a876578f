"""The network whose first layer is computed from the data."""

from types import SimpleNamespace

import pytest
import torch
from pages import PACKAGE
from torch.nn import functional

module = pytest.importorskip("project.models.whitened_cnn")
Whiten, WhitenedCNN, whiten = module.Whiten, module.WhitenedCNN, module.whiten


def smooth_images(num: int, channels: int, size: int = 16) -> torch.Tensor:
    """Neighbouring pixels are alike, as in photographs, and have a mean that is not 0."""
    noise = torch.randn(
        num, channels, size + 4, size + 4, generator=torch.Generator().manual_seed(0)
    )
    return 0.4 + 0.2 * functional.avg_pool2d(noise, 5, stride=1)


@pytest.mark.parametrize("channels", [1, 3])
def test_whitened_patches_are_uncorrelated_and_of_variance_one(channels: int) -> None:
    layer, images = Whiten(channels), smooth_images(100, channels)
    layer.fit(images)
    outputs = layer(images).transpose(0, 1).flatten(1)  # (outputs, all positions)
    half = len(outputs) // 2
    assert half == 4 * channels
    torch.testing.assert_close(outputs[:half], -outputs[half:])
    torch.testing.assert_close(outputs.mean(1), torch.zeros(2 * half), atol=1e-3, rtol=0)
    covariance = torch.cov(outputs[:half])
    # a little below 1 where there is hardly any variance
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-2
    assert covariance.diag()[: half // 2].min() > 0.95
    assert covariance.diag().max() < 1.01


def test_an_image_without_variance_gives_numbers() -> None:
    layer = Whiten(3)
    layer.fit(torch.full((4, 3, 8, 8), 0.5))
    assert layer(torch.rand(2, 3, 8, 8)).isfinite().all()


def test_the_size_is_the_papers() -> None:
    net = WhitenedCNN(10)
    trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    assert trained + net.whiten.weight.numel() == 1_971_640
    assert not [
        name
        for name, value in net.named_parameters()
        if "norm" in name and value.requires_grad == ("weight" in name)
    ]


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28), (3, 64)])
def test_images_of_several_sizes_give_logits(channels: int, size: int) -> None:
    net = WhitenedCNN(7, in_channels=channels, widths=[8, 16, 16])
    images = torch.rand(5, channels, size, size)
    whiten(net, images)
    assert net(images).shape == (5, 7)


def test_on_a_gpu_its_computed_weights_have_the_layout_of_the_trained_ones(monkeypatch):
    net = WhitenedCNN(10)
    classifier = pytest.importorskip(f"{PACKAGE}.classifier").Classifier
    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    monkeypatch.setattr(classifier, "trainer", SimpleNamespace(strategy=strategy), raising=False)
    classifier(net, num_classes=10).prepare_net(trains=False)
    for weight in (net.whiten.weight, net.blocks[0].conv1.weight):
        assert weight.is_contiguous(memory_format=torch.channels_last)


def test_wrong_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="three numbers"):
        WhitenedCNN(10, widths=[8, 8])
