"""What the dry run and the first step say about networks that run and are wrong: broken
networks have a line, and sound ones have none."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from example.models.mlp import MLP
from lightning.pytorch.utilities.seed import isolate_rng
from small import Points
from torch import Tensor, nn
from torch.nn import functional

from lightbase.checks.network import check_network
from lightbase.watch.dry_run import run_network

ROWS = torch.linspace(2, -1, 20).sin().view(2, 10)
SEQUENCES = torch.linspace(2, -1, 140).sin().view(2, 7, 10)
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 0], [8, 9, 2, 0, 0, 0]])


class Net(nn.Module):
    """A linear layer, other parts, and a function of it and the inputs."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 5)
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def kept(net: Any, x: Tensor) -> Tensor:
    net.state = net.linear(x) + net.state / 2
    return net.state


def numpy_noise(net: Any, x: Tensor) -> Tensor:
    return net.linear(x) + float(np.random.default_rng().normal())


def recurrent(net: Any, x: Tensor) -> Tensor:
    return net.part(x)[0][:, -1]


def attention(net: Any, x: Tensor) -> Tensor:
    return net.part(x, x, x)[0].mean(1)


def always_dropped(net: Any, x: Tensor) -> Tensor:
    q, k, v = x.split([4, 4, 2], 2)
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def first_of(name: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda net, x: next(iter(getattr(net, name)))(net.linear(x))


def batch_norm(net: Any, x: Tensor) -> Tensor:
    return functional.batch_norm(net.linear(x), None, None, training=True)


BROKEN = {
    "change from call to call": [
        (Net(lambda net, x: functional.dropout(net.linear(x), 0.5)), ROWS),
        (Net(lambda net, x: nn.Dropout()(net.linear(x))), ROWS),
        (Net(lambda net, x: net.linear(x + torch.randn(10))), ROWS),
        (Net(numpy_noise), ROWS),
        (Net(kept, state=0), ROWS),
        (Net(always_dropped), SEQUENCES),
    ],
    "depend on the other samples": [
        (Net(lambda net, x: net.linear(x - x.mean(0))), ROWS),
        (Net(lambda net, x: net.linear(x / x.abs().max())), ROWS),
        (Net(lambda net, x: net.linear(x).softmax(0)), ROWS),
        (Net(lambda net, x: net.linear(x.t().reshape(-1, 10))), ROWS),
        (Net(lambda net, x: functional.normalize(net.linear(x), dim=0)), ROWS),
        (Net(lambda net, x: functional.layer_norm(x, x.shape)), ROWS),
        (Net(recurrent, part=nn.LSTM(10, 8)), SEQUENCES),
        (Net(recurrent, part=nn.GRU(10, 8)), SEQUENCES),
        (Net(attention, part=nn.MultiheadAttention(10, 2)), SEQUENCES),
        (nn.TransformerEncoderLayer(10, 2, 16), SEQUENCES),
    ],
    "are not trained, saved or moved": [
        (Net(first_of("parts"), parts=[nn.Linear(5, 5)]), ROWS),
        (Net(first_of("parts"), parts=(nn.Linear(5, 5), nn.Linear(5, 5))), ROWS),
        (Net(lambda net, x: net.d["a"](x), d={"a": nn.Linear(10, 5)}), ROWS),
        (Net(lambda net, x: net.d[0][0](x), d=[[nn.Linear(10, 5)]]), ROWS),
        (Net(lambda net, x: nn.Linear(10, 5)(x)), ROWS),
    ],
    "for a single sample lose a dimension": [
        (Net(lambda net, x: net.linear(x).squeeze()), ROWS),
        (Net(lambda net, x: net.linear(x)[:, :1].squeeze()), ROWS),
    ],
    "fails with a single sample": [
        (Net(batch_norm), ROWS),
        (nn.BatchNorm1d(10, track_running_stats=False), ROWS),
        (Net(lambda net, x: torch.cat([net.linear(x).squeeze(0)[:, :1]])), ROWS),
    ],
}


def frozen(net: Any, x: Tensor) -> Tensor:
    return net.linear(x) + net.hidden[0](x)


def on_the_fly(net: Any, x: Tensor) -> Tensor:
    return nn.Sequential(net.linear, nn.ReLU())(x)


def packed(net: Any, x: Tensor) -> Tensor:
    lengths = (x != 0).sum(1)
    x = nn.utils.rnn.pack_padded_sequence(net.embedding(x), lengths, True, False)
    return net.linear(net.gru(x)[1][-1])


def trimmed(net: Any, x: Tensor) -> Tensor:
    return net.linear(net.embedding(x[:, : int((x != 0).sum(1).max())]))


def similarity(net: Any, x: Tensor) -> Tensor:
    return net.linear(x) @ net.linear(x).T


SOUND = [
    (MLP([10, 8, 3]), ROWS),
    (nn.Sequential(nn.Linear(10, 5), nn.BatchNorm1d(5), nn.Dropout()), ROWS),
    (Net(recurrent, part=nn.LSTM(10, 8, 2, batch_first=True, dropout=0.5)), SEQUENCES),
    (
        Net(attention, part=nn.MultiheadAttention(10, 2, 0.5, batch_first=True)),
        SEQUENCES,
    ),
    (nn.TransformerEncoderLayer(10, 2, 16, batch_first=True), SEQUENCES),
    (nn.LSTM(10, 5, 2, batch_first=True), SEQUENCES),  # its states are (2, N, 5)
    (Net(frozen, hidden=[nn.Linear(10, 5).requires_grad_(False)]), ROWS),
    (Net(on_the_fly), ROWS),
    (Net(similarity), ROWS),
    (Net(lambda net, x: net.linear(x).mean()), ROWS),
    (Net(lambda net, x: net.linear(x).sub(9).log()), ROWS),  # NaN
    (Net(lambda net, x: net.linear(x) > 0), ROWS),
    (Net(lambda net, x: [{"boxes": y.view(-1, 5)} for y in net.linear(x)]), ROWS),
    (Net(lambda net, x: torch.zeros(2, 5)[: len(x)]), ROWS),
    (
        Net(packed, embedding=nn.Embedding(9, 6), gru=nn.GRU(6, 10, batch_first=True)),
        TOKENS % 9,
    ),
    (Net(trimmed, embedding=nn.Embedding(10, 10)), TOKENS),
    (torchvision.models.resnet18(), torch.randn(2, 3, 32, 32)),
    (torchvision.models.mobilenet_v3_small(), torch.randn(2, 3, 32, 32)),
    (torchvision.models.squeezenet1_0(), torch.randn(2, 3, 32, 32)),
]


@torch.no_grad()
def lines(net: nn.Module, inputs: Tensor) -> list[str]:
    net.eval()
    with isolate_rng():
        return [*check_network(net, inputs, net(inputs))]


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_network_has_a_line(words: str) -> None:
    for net, inputs in BROKEN[words]:
        assert words in lines(net, inputs)[0], net


def test_a_sound_network_has_none() -> None:
    for net, inputs in SOUND:
        assert lines(net, inputs) == [], net


def test_the_checks_change_no_mode_no_buffer_and_no_random_state(capsys: Any) -> None:
    net = nn.Sequential(nn.Linear(10, 5), nn.BatchNorm1d(5), nn.Dropout().eval())
    before = {name: x.clone() for name, x in net.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        run_network(net, ROWS, "Rows (train)", "32-true")
    assert [module.training for module in net] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert capsys.readouterr().out == ""


# a training


class Large(nn.Module):
    """Outputs of a wrong scale, and a layer without a use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 2)
        self.unused = nn.Linear(10, 2)
        self.frozen = nn.Linear(10, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(100 * x) + self.frozen(x)


class Offset(Points):
    def normalize(self, inputs: Tensor) -> Tensor:
        return inputs + 50


FLAGS = "--monitor val/loss --model.net test_check_network.Large --data.batch_size 10"


def test_the_first_step_names_a_wrong_scale_and_unused_parameters(train, capsys):
    train(f"{FLAGS} --data test_check_network.Offset")
    printed = capsys.readouterr().out
    assert "the first loss is " in printed
    assert "and 0.693 is usual: outputs reach " in printed
    assert "inputs have mean 50." in printed
    assert (
        "2 parameters got no gradient in the first step, such as net.unused" in printed
    )
    assert printed.count("Network: ") == 3


@pytest.mark.parametrize("flag", ["checks", "try_network"])
def test_without_checks_nothing_is_said(train, capsys, flag):
    train(f"{FLAGS} --data test_check_network.Offset --{flag} false")
    assert "Network: " not in capsys.readouterr().out
