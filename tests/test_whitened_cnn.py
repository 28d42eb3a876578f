"""The network whose first layer is computed from the data."""

from typing import Any

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.nn import functional

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
    logits = net.logits(images)
    if mirror or (mirror is None and channels == 3):
        logits = (logits + net.logits(images.flip(-1))) / 2
    torch.testing.assert_close(net(images), logits)
    assert net.train()(images).shape == (5, 7)


# a call inside Lightning 2.6
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning")
def test_the_callback_whitens_before_a_new_training_only(tmp_path, classifier) -> None:
    synthetic = pytest.importorskip("project.data.synthetic").SyntheticImages
    file = str(tmp_path / "last.ckpt")

    def trained(data: Any, weights: Any = None, ckpt_path: Any = None) -> Any:
        net = WhitenedCNN(4, widths=[8, 8, 8])
        loss = nn.CrossEntropyLoss()
        model = classifier(net, loss, num_classes=4, lr=0.001, weights=weights)
        trainer = Trainer(
            accelerator="cpu",
            callbacks=[module.WhitenFirstLayer()],
            default_root_dir=tmp_path,
            limit_train_batches=1,
            limit_val_batches=0,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(file)
        return net.whiten.weight

    data = synthetic((3, 32, 32), 4, num_train=1200, num_test=20)
    first = trained(data)
    samples = data.splits["train"]
    images = samples.__getitems__([i * len(samples) // 1000 for i in range(1000)])[0]
    expected = Whiten(3)
    expected.fit(data.normalize(images))
    assert torch.equal(first, expected.weight)
    others = synthetic((3, 32, 32), 4, num_train=90, num_test=20)
    assert torch.equal(trained(others, weights=file), first)
    assert torch.equal(trained(others, ckpt_path=file), first)
