"""Networks that are compiled by inductor."""

import shutil

import pytest
import torch
from torch import nn

from lightbase.compat import round_as_eager


class Pooled(nn.Module):
    """The end of a WhitenedCNN: GELU, then the largest value of each channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return nn.functional.gelu(self.conv(x)).amax((2, 3))


@pytest.mark.slow
def test_compiled_gradients_in_bf16_are_those_of_eager_steps():
    if not shutil.which("g++"):
        pytest.skip("inductor needs g++")
    torch.manual_seed(0)
    net, x = Pooled(), torch.randn(4, 3, 8, 8)
    round_as_eager()
    gradients = []
    for forward in (net, torch.compile(net, backend="inductor")):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            forward(x).float().square().mean().backward()
        gradients.append(net.conv.weight.grad.clone())
    assert torch.allclose(*gradients, rtol=0.05, atol=1e-3)
