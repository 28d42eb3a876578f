"""Optimizers, schedules and parameter groups by name."""

import math

import pytest
import torch
from torch import nn
from written import checkpoint, refused

from lightbase.config.errors import UserError
from lightbase.model.optim import (
    build_optimizer,
    build_scheduler,
    check_options,
    grouped,
)


def parameter():
    return [{"params": [nn.Parameter(torch.ones(3))]}]


def rates(name, args, num_steps, groups=None):
    """Return the rates of the groups before each step."""
    optimizer = build_optimizer("SGD", {"momentum": 0.9}, groups or parameter(), lr=1.0)
    scheduler = build_scheduler(name, args, optimizer, num_steps)
    history = []
    for _ in range(num_steps):
        history.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return [*zip(*history, strict=True)]


def test_the_schedules_of_the_library():
    (history,) = rates("WarmupCosineLR", {"warmup_steps": 4}, 20)
    assert history[:4] == (0.25, 0.5, 0.75, 1.0)
    expected = [(1 + math.cos(math.pi * step / 16)) / 2 for step in range(16)]
    assert history[4:] == pytest.approx(expected)
    (history,) = rates("FinalDecayLR", {"decay_fraction": 0.5}, 8)
    assert [*history] == [1] * 5 + [0.75, 0.5, 0.25]


def test_the_length_of_the_training_and_the_highest_rate_are_filled_in():
    (cosine,) = rates("CosineAnnealingLR", {}, 10)
    assert cosine[5] == pytest.approx(0.5)
    (warm_up,) = rates("LinearLR", {}, 10)
    assert warm_up[4] < warm_up[5] == pytest.approx(1)
    (one_cycle,) = rates("OneCycleLR", {}, 10)
    assert max(one_cycle) == pytest.approx(1.0)
    args = {"max_lr": 1.0, "epochs": 2, "steps_per_epoch": 5}
    assert rates("OneCycleLR", args, 10) == [one_cycle]


def small_net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_parameter_is_in_the_first_group_that_it_fits_or_in_the_rest():
    named = dict(small_net().named_parameters(prefix="net"))
    names = {id(value): name for name, value in named.items()}
    # beside the network, with a name that is also in it
    named["2.bias"] = nn.Parameter(torch.zeros(2))
    names[id(named["2.bias"])] = "2.bias"
    options = {
        "2": {"lr": 0.5},
        "*.bias": {"lr": 0.25},
        "norms_and_biases": {"weight_decay": 0.0},
    }
    groups = grouped(named.items(), options)
    path = "torch.optim.RMSprop"
    built = build_optimizer(path, {"weight_decay": 0.1}, groups, lr=0.125)
    assert isinstance(built, torch.optim.RMSprop)
    found = []
    for group in built.param_groups:
        members = [names[id(value)] for value in group["params"]]
        found.append((members, group["lr"], group["weight_decay"]))
    assert found == [
        (["net.0.weight"], 0.125, 0.1),
        (["net.2.weight", "net.2.bias", "2.bias"], 0.5, 0.1),
        (["net.0.bias", "net.1.bias"], 0.25, 0.1),
        (["net.1.weight"], 0.125, 0),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": {"lr": 0.1}}, "no parameter of the network has such a name"),
        ({"0": {"momentun": 0.1}}, "no option momentun of SGD; it has .*, momentum,"),
        ({"*.bias": {}, "0.bias": {}}, "in the first group that it matches"),
    ],
)
def test_a_group_that_cannot_be_is_refused(options, message):
    def build():
        groups = grouped(small_net().named_parameters(), options)
        check_options(options, build_optimizer("SGD", {}, groups, lr=0.1))

    with pytest.raises(UserError, match=message) as caught:
        build()
    assert caught.value.status == 2


# the length of a schedule by steps

GRADUAL = (
    "--trainer.callbacks lightning.pytorch.callbacks.GradientAccumulationScheduler",
    *("--trainer.callbacks.scheduling", "{0: 1, 1: 4}"),
)


def test_a_schedule_by_steps_needs_to_know_its_length(train, tmp_path, capsys):
    name = "--model.scheduler WarmupCosineLR"
    error = refused(capsys, tmp_path, lambda: train(name, *GRADUAL))
    assert "GradientAccumulationScheduler" in error
    train(name, "--trainer.accumulate_grad_batches 4")
    one_cycle = ("--model.scheduler OneCycleLR --name cycle --model.scheduler_args",)
    train(*GRADUAL, *one_cycle, "{total_steps: 24}")
    train(*GRADUAL, "--model.scheduler CosineAnnealingLR --name epochs")
    for run, num_steps in (("tiny", 10), ("cycle", 19 + 5), ("epochs", 2)):
        (schedule,) = checkpoint(tmp_path / run / "version_0")["lr_schedulers"]
        assert schedule["last_epoch"] == num_steps
