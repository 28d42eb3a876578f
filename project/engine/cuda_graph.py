"""A training step as a CUDA graph: one launch in place of about a hundred, which is what a small network waits for."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3
"""Steps before the capture, in which libraries and the optimiser set themselves up."""


def capture(function: Callable[[], None]) -> Callable[[], None]:
    """What launches all that `function` does on the GPU; it is recorded here, not run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def on_side_stream(function: Callable[[], None]) -> None:
    """Run it where a capture will not meet its memory; see "Whole-network capture" in PyTorch's notes on CUDA."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


class GraphedStep:
    """Calls `step(x, y)`, first as it is, then by a graph of it. Batches of another shape are never taken by the graph.

    step: one whole training step that waits for nothing, with an optimiser that is `capturable` and whose learning rate
        is a tensor on the GPU.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], None]) -> None:
        self.step = step
        self.num_steps = 0
        self.replay: Callable[[], None] | None = None

    def __call__(self, x: Tensor, y: Tensor) -> None:
        if self.replay is None and self.num_steps == WARM_UP:
            self.x, self.y = x.clone(), y.clone()
            self.replay = capture(lambda: self.step(self.x, self.y))
        if self.replay is None:
            on_side_stream(lambda: self.step(x, y))
            self.num_steps += 1
        elif x.shape != self.x.shape:
            self.step(x, y)
        else:
            self.x.copy_(x)
            self.y.copy_(y)
            self.replay()
