"""Test-time augmentation: outputs averaged over several views of each sample."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from project.base.errors import UserError
from project.base.imports import function_at


def mean_over_views(net: nn.Module, test_views: str | Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The mean of the outputs (N, ...) for several tensors that are made of x, (N, ...)."""
    make_views: Any = function_at("test_views", test_views)
    views = make_views(x)
    are_tensors = isinstance(views, list | tuple) and all(
        isinstance(view, Tensor) for view in views
    )
    if not are_tensors or not views or any(view.shape[0] != x.shape[0] for view in views):
        kind = type(views).__name__ if not are_tensors or views else "list of nothing"
        what = f"{getattr(make_views, '__name__', make_views)} gives a {kind}"
        raise UserError(
            f"model.test_views: {what}, where a list of tensors belongs, each with all "
            f"{len(x)} samples",
            2,
        )
    return torch.stack([net(view) for view in views]).mean(0)
