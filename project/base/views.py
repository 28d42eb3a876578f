"""Test-time augmentation: outputs averaged over several views of each sample."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from project.base.errors import UserError


def mean_over_views(net: nn.Module, make_views: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The mean of the outputs (N, ...) for several tensors that are made of x, (N, ...)."""
    views = make_views(x)
    are_tensors = isinstance(views, list | tuple) and all(isinstance(view, Tensor) for view in views)
    if not are_tensors or any(len(view) != len(x) for view in views):
        what = f"{getattr(make_views, '__name__', make_views)} gives a {type(views).__name__}"
        raise UserError(f"model.test_views: {what}, where a list of tensors belongs, each with all {len(x)} samples", 2)
    return torch.stack([net(view) for view in views]).mean(0)
