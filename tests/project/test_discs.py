import pytest
import torch
from attached import attach
from torch import nn

Discs = pytest.importorskip("project.data.discs").Discs


def test_discs_are_seeded_and_their_area_tells_their_radius() -> None:
    data = Discs(num_train=200, num_test=100, noise=0)
    images, radius = data.load("train")
    assert images.shape == (200, 1, 32, 32)
    assert images.dtype == torch.uint8
    assert radius.shape == (200,)
    assert radius.dtype == torch.float32
    assert 3 <= radius.min() < radius.max() <= 12
    brightest = images.flatten(1).amax(1)
    assert brightest.min() >= 76
    area = images.flatten(1).sum(1) / brightest
    torch.testing.assert_close((area / torch.pi).sqrt(), radius, atol=0.1, rtol=0)
    assert torch.equal(images, Discs(num_train=200, noise=0).load("train")[0])
    assert not torch.equal(images[:100], data.load("test")[0])
    assert not torch.equal(images, Discs(num_train=200, noise=0, data_seed=1).load("train")[0])
    assert data.num_classes is None


def test_a_small_network_learns_the_radius() -> None:
    torch.manual_seed(0)
    data = attach(Discs(num_train=3_000, num_test=300))
    data.setup("test")
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(3):
        for images, radius in data.train_dataloader():
            optimizer.zero_grad()
            nn.functional.mse_loss(net(data.normalize(images)), radius).backward()
            optimizer.step()
    images, radius = data.load("test")
    with torch.no_grad():
        assert (net(data.normalize(images)) - radius).abs().mean() < 1.2  # 2.25 without learning
