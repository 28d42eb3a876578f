"""The callback that pulls the weights back to their running average."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

Lookahead = pytest.importorskip("project.lookahead").Lookahead


def trained(num_steps: int, stop_after: int | None = None) -> dict[str, torch.Tensor]:
    """Return the weights after steps that add random numbers to them. The callback is
    made again from its state after `stop_after` steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    trainer = trainer_at(0, num_steps)
    callback: Any = Lookahead()
    callback.on_train_start(trainer, net)
    for step in range(1, num_steps + 1):
        random_step(net)
        trainer.global_step = step
        callback.on_train_batch_end(trainer, net, None, None, step)
        if step == stop_after:
            state = {name: value.clone() for name, value in callback.averages.items()}
            callback = Lookahead()
            callback.load_state_dict(state)
            callback.on_train_start(trainer, net)
    return net.state_dict()


def trainer_at(step: int, num_steps: int, accumulated: int = 1) -> Any:
    return SimpleNamespace(
        global_step=step,
        estimated_stepping_batches=num_steps,
        accumulate_grad_batches=accumulated,
        is_last_batch=False,
    )


def random_step(net: nn.Module) -> None:
    for value in net.state_dict().values():
        value.add_(torch.randn(value.shape).to(value.dtype))


@pytest.mark.parametrize("num_steps", [20, 23])
def test_every_five_steps_the_weights_become_their_average(num_steps) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = {name: value.clone() for name, value in net.state_dict().items()}
    for step in range(1, 21):
        random_step(net)
        if step % 5 or step == num_steps:
            continue
        decay = 0.95**5 * (step / num_steps) ** 3
        for name, value in net.state_dict().items():
            if value.is_floating_point():  # not BatchNorm's counter
                average[name] = decay * average[name] + (1 - decay) * value
                value.copy_(average[name])
    weights = trained(num_steps)
    assert weights.keys() == average.keys()
    for name, value in weights.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, average[name])


@pytest.mark.parametrize("stop_after", [10, 13])
def test_its_state_in_a_checkpoint_continues_exactly(stop_after) -> None:
    stopped, expected = trained(23, stop_after), trained(23)
    for name, value in expected.items():
        assert torch.equal(stopped[name], value)


def test_a_step_of_several_batches_is_averaged_once() -> None:
    """Batches before the next step change the statistics of batch norms."""
    net = nn.BatchNorm1d(2)
    trainer, callback = trainer_at(5, 20, accumulated=3), Lookahead()
    callback.on_train_start(trainer, net)
    means = []
    for batch_idx in range(14, 17):  # batch 14 ends step 5
        random_step(net)
        callback.on_train_batch_end(trainer, net, None, None, batch_idx)
        means.append(callback.averages["running_mean"].clone())
    assert means[0].any()
    assert torch.equal(means[1], means[0])
    assert torch.equal(means[2], means[0])


def test_averages_that_are_loaded_again_stay_on_their_device() -> None:
    lookahead = Lookahead()
    lookahead.averages = {"w": torch.ones(2, device="meta")}  # as a GPU
    lookahead.load_state_dict({"w": torch.ones(2), "v": torch.ones(3)})
    devices = {name: x.device.type for name, x in lookahead.averages.items()}
    assert devices == {"w": "meta", "v": "cpu"}
