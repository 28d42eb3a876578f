"""Optimizers, schedules and parameter groups by name."""

import math
import os
from typing import Any

import pytest
import torch
from torch import nn
from written import checkpoint, refused

from lightbase.core.compat import quiet_lightning
from lightbase.core.errors import UserError
from lightbase.core.module import BaseModule
from lightbase.core.optim import (
    build_optimizer,
    build_scheduler,
    check_options,
    grouped,
)


def parameter() -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(3))]}]


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
        ("AdamW", {"weight_decay": 0.1}, torch.optim.AdamW),
        ("torch.optim.RMSprop", {}, torch.optim.RMSprop),
    ],
)
def test_any_optimizer_by_name(name: str, args: dict, expected: type) -> None:
    optimizer = build_optimizer(name, args, parameter(), lr=0.25)
    assert type(optimizer) is expected
    assert optimizer.param_groups[0]["lr"] == 0.25
    for key, value in args.items():
        assert optimizer.param_groups[0][key] == value


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_a_fused_step_where_torch_has_it(name, device, monkeypatch):
    weights = parameter()
    monkeypatch.setattr(nn.Parameter, "device", torch.device(device), raising=False)
    optimizer = build_optimizer(name, {}, weights, lr=0.1, fused=True)
    # torch 2.11 refuses Adagrad's at its first step on a GPU
    has_it = name in ("SGD", "Adam", "AdamW") or (name, device) == ("Adagrad", "cpu")
    assert bool(optimizer.param_groups[0].get("fused")) == has_it


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Addam", {}, "did you mean Adam"),
        ("Optimizer", {}, "no optimizer"),
        ("torch.nn.Linear", {}, "no optimizer"),
        ("nowhere.SGD", {}, "cannot be imported"),
        ("SGD", {"momentun": 0.9}, "(?s)'momentun'.*it takes .*, momentum,"),
        ("SGD", {"momentum": -1}, "Invalid momentum"),
        ("SGD", {"momentum": "high"}, "high"),
        ("SGD", {"lr": 0.1}, "--model.lr"),
    ],
)
def test_a_mistake_names_the_way_out(name: str, args: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_optimizer(name, args, parameter(), lr=0.1)
    assert caught.value.status == 2


def rates(name: str, args: dict, num_steps: int) -> list[float]:
    optimizer = build_optimizer("SGD", {}, parameter(), lr=1.0)
    scheduler = build_scheduler(name, args, optimizer, num_steps)
    history = []
    for _ in range(num_steps):
        history.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return history


def test_warmup_is_linear_then_the_cosine_ends_at_zero() -> None:
    history = rates("WarmupCosineLR", {"warmup_steps": 4}, 20)
    assert history[:4] == [0.25, 0.5, 0.75, 1.0]
    expected = [(1 + math.cos(math.pi * step / 16)) / 2 for step in range(16)]
    assert history[4:] == pytest.approx(expected)


def test_the_final_decay_is_constant_then_a_line_to_zero() -> None:
    history = rates("FinalDecayLR", {"decay_fraction": 0.5}, 8)
    assert history == [1] * 5 + [0.75, 0.5, 0.25]
    assert rates("FinalDecayLR", {}, 20) == pytest.approx([1] * 19 + [0.5])


def test_the_length_of_the_training_is_filled_in() -> None:
    cosine = rates("CosineAnnealingLR", {}, 10)
    assert cosine[5] == pytest.approx(0.5)
    assert rates("CosineAnnealingLR", {"T_max": 20}, 10)[5] == pytest.approx(0.853553)
    one_cycle = rates("OneCycleLR", {}, 10)
    assert max(one_cycle) == pytest.approx(1.0)
    args = {"max_lr": 1.0, "epochs": 2, "steps_per_epoch": 5}
    assert rates("OneCycleLR", args, 10) == one_cycle


def test_the_highest_rate_is_the_learning_rate() -> None:
    args = {"base_lr": 0.1, "step_size_up": 3, "cycle_momentum": False}
    assert max(rates("CyclicLR", args, 8)) == pytest.approx(1.0)
    with pytest.raises(
        UserError, match=r"max_lr 2\.0: the highest rate is --model\.lr, 1\.0"
    ):
        rates("OneCycleLR", {"max_lr": 2.0}, 10)


@pytest.mark.parametrize(
    ("name", "interval"),
    [
        ("torch.optim.lr_scheduler.CyclicLR", "step"),
        ("WarmupCosineLR", "step"),
        ("CosineAnnealingLR", "epoch"),
        (None, "epoch"),
    ],
)
def test_schedulers_made_for_steps(name, interval) -> None:
    model = BaseModule(nn.Identity(), scheduler=name)
    assert model.step_scheduler_every() == interval


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("CosineAnealingLR", {}, "did you mean CosineAnnealingLR"),
        ("StepLR", {"stepsize": 3}, "(?s)'stepsize'.*it takes .*step_size"),
        ("WarmupCosineLR", {"warmup_steps": -1}, "negative"),
        ("FinalDecayLR", {"decay_fraction": 0}, "decay_fraction 0"),
        ("LRScheduler", {}, "no scheduler"),
    ],
)
def test_a_wrong_scheduler(name: str, args: dict, message: str) -> None:
    optimizer = build_optimizer("SGD", {}, parameter(), lr=1.0)
    with pytest.raises(UserError, match=message):
        build_scheduler(name, args, optimizer, num_steps=10)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def names_of(groups: list[dict[str, Any]], net: nn.Module) -> list[list[str]]:
    by_id = {id(value): name for name, value in net.named_parameters()}
    return [[by_id[id(value)] for value in group["params"]] for group in groups]


def test_a_parameter_is_in_the_first_group_that_it_fits_or_in_the_rest() -> None:
    net = small_net()
    options = {
        "2": {"lr": 0.5},
        "*.bias": {"lr": 0.25},
        "norms_and_biases": {"weight_decay": 0.0},
    }
    groups = grouped(
        ((f"net.{name}", value) for name, value in net.named_parameters()), options
    )
    names = [["0.weight"], ["2.weight", "2.bias"], ["0.bias", "1.bias"], ["1.weight"]]
    assert names_of(groups, net) == names
    built = build_optimizer("SGD", {"weight_decay": 0.1}, groups, lr=0.125).param_groups
    rates = [(group["lr"], group["weight_decay"]) for group in built]
    assert rates == [(0.125, 0.1), (0.5, 0.1), (0.25, 0.1), (0.125, 0)]


def test_a_head_beside_the_network_is_not_lost_to_one_of_the_same_name_in_it() -> None:
    names = ["head.weight", "net.head.weight", "net.stem.weight"]
    named = [(name, nn.Parameter(torch.zeros(i))) for i, name in enumerate(names)]
    rest, head = grouped(named, {"head": {"lr": 0.5}})
    assert [len(parameter) for parameter in head["params"]] == [0, 1]
    assert [len(parameter) for parameter in rest["params"]] == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": {"lr": 0.1}}, "no parameter of the network has such a name"),
        ({"0.wieght": {"lr": 0.1}}, "did you mean 0.weight"),
        ({"0": {"lr": math.inf}}, "learning rate is a number over 0"),
        ({"0": {"lr": "fast"}}, "0.lr 'fast': a learning rate is a number over 0"),
        ({"0": {"momentun": 0.1}}, "no option momentun of SGD; it has .*, momentum,"),
        ({"0": {"fused": True}}, "no option fused"),
        (
            {"*.bias": {"lr": 1.0}, "0.bias": {"lr": 0.1}},
            "in the first group that it matches",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused(options: dict, message: str) -> None:
    def build() -> None:
        groups = grouped(small_net().named_parameters(), options)
        check_options(options, build_optimizer("SGD", {}, groups, lr=0.1))

    with pytest.raises(UserError, match=message) as caught:
        build()
    assert caught.value.status == 2


def test_every_group_rises_to_its_own_rate_and_falls_with_the_others() -> None:
    net = small_net()
    groups = grouped(net.named_parameters(), {"2": {"lr": 8.0}})
    optimizer = build_optimizer("SGD", {"momentum": 0.9}, groups, lr=1.0)
    args = {"pct_start": 0.5, "anneal_strategy": "linear"}
    scheduler = build_scheduler("OneCycleLR", args, optimizer, 10)
    history = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(9):
        optimizer.step()
        scheduler.step()
        history.append([group["lr"] for group in optimizer.param_groups])
    assert max(history) == [1.0, 8.0]
    for rate, other in history:
        assert other == pytest.approx(8 * rate)


@pytest.mark.parametrize(("has_gpu", "num"), [(False, 0), (True, 1)])
def test_without_a_gpu_no_step_looks_for_one(monkeypatch, has_gpu, num):
    monkeypatch.setenv(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # as Lightning sets it for all
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    quiet_lightning()
    assert int("PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ) == num


# the length of a schedule by steps

GRADUAL = (
    "--trainer.callbacks lightning.pytorch.callbacks.GradientAccumulationScheduler",
    *("--trainer.callbacks.scheduling", "{0: 1, 1: 4}"),
)


def last_schedule(folder: Any) -> Any:
    """The state of the schedule at the end of the training."""
    (schedule,) = checkpoint(folder / "tiny" / "version_0")["lr_schedulers"]
    return schedule


@pytest.mark.parametrize("name", ["OneCycleLR", "WarmupCosineLR", "FinalDecayLR"])
def test_a_schedule_of_unknown_length_is_refused(train, tmp_path, capsys, name):
    run = lambda: train("--model.scheduler", name, *GRADUAL)  # noqa: E731
    assert "GradientAccumulationScheduler" in refused(capsys, tmp_path, run)
    train("--model.scheduler", name, "--trainer.accumulate_grad_batches 4")
    schedule = last_schedule(tmp_path)
    assert schedule["last_epoch"] == schedule["total_steps"] == 10


@pytest.mark.parametrize(
    ("name", "arguments", "num_steps"),
    [
        ("OneCycleLR", "{total_steps: 24}", 19 + 5),
        ("StepLR", "{step_size: 1, gamma: 0.1}", 2),
        ("CosineAnnealingLR", "{}", 2),
    ],
)
def test_a_schedule_that_knows_its_length_trains(
    train, tmp_path, name, arguments, num_steps
):
    train(*GRADUAL, "--model.scheduler", name, "--model.scheduler_args", arguments)
    assert last_schedule(tmp_path)["last_epoch"] == num_steps
