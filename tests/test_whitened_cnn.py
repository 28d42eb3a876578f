"""The network whose first layer is computed from the data."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from lightbase import UserError

module = pytest.importorskip("project.models.whitened_cnn")
Whiten, WhitenedCNN = module.Whiten, module.WhitenedCNN


@pytest.mark.parametrize("channels", [1, 3])
def test_whitened_patches_are_uncorrelated_and_of_variance_one(channels) -> None:
    # neighbouring pixels are alike, as in photographs, and have a mean that is not 0
    noise = torch.randn(
        100, channels, 20, 20, generator=torch.Generator().manual_seed(0)
    )
    images = 0.4 + 0.2 * functional.avg_pool2d(noise, 5, stride=1)
    layer = Whiten(channels)
    layer.fit(images)
    outputs = layer(images).transpose(0, 1).flatten(1)  # (outputs, all positions)
    half = 4 * channels
    torch.testing.assert_close(outputs[:half], -outputs[half:])
    assert outputs.mean(1).abs().max() < 1e-3
    covariance = torch.cov(outputs[:half])
    # a little below 1 where there is hardly any variance
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-2
    assert covariance.diag()[: half // 2].min() > 0.95
    assert covariance.diag().max() < 1.01


def test_the_size_is_the_papers() -> None:
    net = WhitenedCNN(10)
    trained = [value.numel() for value in net.parameters() if value.requires_grad]
    assert sum(trained) + net.whiten.weight.numel() == 1_971_640
    net.whiten.fit(torch.full((4, 3, 8, 8), 0.5))  # images without variance
    assert net(torch.rand(2, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize(
    ("channels", "mirror", "size"),
    [(3, None, 32), (1, None, 28), (1, True, 28), (3, False, 64)],
)
def test_outside_training_it_averages_the_logits_of_mirrored_images(
    channels, mirror, size
) -> None:
    net = WhitenedCNN(7, channels, widths=[8, 16, 16], mirror=mirror).eval()
    images = torch.rand(5, channels, size, size)

    def mirrored(images: torch.Tensor) -> torch.Tensor:
        if mirror or (mirror is None and channels == 3):
            return (net.logits(images) + net.logits(images.flip(-1))) / 2
        return net.logits(images)

    torch.testing.assert_close(net(images), mirrored(images))
    net.translate = True
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    corners = padded[..., :size, :size], padded[..., 2:, 2:]
    shifted = (mirrored(corners[0]) + mirrored(corners[1])) / 2
    torch.testing.assert_close(net(images), (mirrored(images) + shifted) / 2)
    net.whiten.fit(images)
    assert torch.equal(net.train()(images), net.logits(images))


def test_it_refuses_to_train_if_nothing_has_computed_its_first_layer() -> None:
    images = torch.rand(4, 3, 32, 32)
    net, computed = WhitenedCNN(7, widths=[8, 8, 8]), WhitenedCNN(7, widths=[8, 8, 8])
    initial = {name: value.clone() for name, value in net.state_dict().items()}
    computed.whiten.fit(images)
    for state in (None, initial):
        if state:
            net.load_state_dict(state)
        with pytest.raises(UserError, match=r"\nadd its callback: .*callbacks\+"):
            net(images)
    net.eval()(images)
    net.load_state_dict(computed.state_dict())  # as a resume does
    net.train()(images)


@pytest.mark.parametrize(
    ("stage", "ckpt_path", "weights", "num_images"),
    [
        ("fit", None, None, 1000),
        ("fit", None, None, 5000),  # there are 1080
        ("fit", "last.ckpt", None, 1000),
        ("fit", None, "best.ckpt", 1000),
        ("test", None, None, 1000),
    ],
)
def test_the_callback_whitens_before_a_new_training_only(
    classifier, stage, ckpt_path, weights, num_images
) -> None:
    synthetic = pytest.importorskip("project.data.synthetic").SyntheticImages
    data = synthetic((3, 32, 32), 4, num_train=1200, num_test=20)
    data.setup("fit")
    net = WhitenedCNN(4, widths=[8, 8, 8])
    expected = Whiten(3)
    if (stage, ckpt_path, weights) == ("fit", None, None):
        samples = data.splits["train"]
        num = min(num_images, len(samples))
        images, _ = samples.__getitems__([i * len(samples) // num for i in range(num)])
        expected.fit(data.normalize(images))
    model = classifier(net, num_classes=4, weights=weights)
    trainer = SimpleNamespace(datamodule=data, ckpt_path=ckpt_path)
    module.WhitenFirstLayer(num_images).setup(trainer, model, stage)
    assert torch.equal(net.whiten.weight, expected.weight)


def test_the_bias_of_the_first_layer_stays_after_its_epochs() -> None:
    net = WhitenedCNN(4, widths=[8, 8, 8])
    images = torch.rand(4, 3, 32, 32)
    net.whiten.fit(images)
    callback = module.WhitenFirstLayer(bias_epochs=2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    biases = []
    for epoch in range(4):
        optimizer.zero_grad()
        net(images).square().mean().backward()
        trainer = SimpleNamespace(current_epoch=epoch)
        callback.on_before_optimizer_step(trainer, SimpleNamespace(net=net), optimizer)
        optimizer.step()
        biases.append(net.whiten.bias.detach().clone())
    assert not torch.equal(biases[0], biases[1])
    assert torch.equal(biases[1], biases[2])  # momentum and decay do not move it
    assert torch.equal(biases[1], biases[3])
