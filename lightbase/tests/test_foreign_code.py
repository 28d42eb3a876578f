"""Modules, networks, metrics, callbacks, strategies and plugins of other packages."""

import pickle
from urllib.error import URLError

import pytest
import torchvision
from lightning.pytorch.strategies import DDPStrategy
from paths import TINY, Train, argv, script
from plain import PlainData, PlainModule

from lightbase.commands.train import make_extras
from lightbase.config.spec import (
    CommandLine,
    RunSpec,
    as_yaml,
    check_round_trip,
    new_spec,
    validate,
)
from lightbase.model.monitor import Monitor
from lightbase.run.fit import make_callbacks
from lightbase.setup.build import build, fill_in

WATCHED = "--device_monitor=true --step_timer=true --figures_every_n_epochs=1"
ON_TINY = f"--config {TINY}"
FACTS = {"num_classes": 4, "image_shape": [3, 8, 8], "in_channels": 3, "in_chans": 3}


def spec_of(*args: str) -> RunSpec:
    spec = new_spec(CommandLine(["--config", TINY, *args]))
    fill_in(spec, FACTS)
    validate(spec, spec.config)
    return spec


def test_the_callbacks_can_be_pickled(tmp_path):
    """Each process of ddp_spawn gets a copy."""
    spec, *_ = build(spec_of(*WATCHED.split()))
    monitor = Monitor("val/acc", "max")
    extras = make_extras(spec)
    pickle.dumps(make_callbacks(spec, tmp_path, None, monitor, extras))


SLOW = {*torchvision.models.list_models(module=torchvision.models)} - {"resnet18"}


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW)),
    ],
)
def test_the_config_of_a_network_of_torchvision_can_be_read_again(name):
    spec = spec_of(f"--model.net=torchvision.models.{name}")
    check_round_trip(spec, as_yaml(spec))
    net = spec.config.model.init_args.net
    assert net.init_args.num_classes == 4


def test_a_network_by_its_name(train: Train):
    net = "--model.net torchvision.models.get_model --model.net.name shufflenet_v2_x0_5"
    train(net, "--trainer.max_steps 1")
    spec = spec_of(*net.split())
    assert spec.config.model.init_args.net.dict_kwargs == {"num_classes": 4}


def test_a_default_that_is_an_enum(train: Train):
    train(
        "--trainer.callbacks lightning.pytorch.callbacks.Timer", "--trainer.max_steps 1"
    )


def test_plugins_and_profilers_of_the_user(train: Train, tmp_path):
    profiler = "--trainer.profiler lightning.pytorch.profilers.PassThroughProfiler"
    train("--trainer.plugins TorchCheckpointIO", profiler)
    assert (tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_profiler_of_pytorch(train: Train):
    """It adds hooks to the metrics of the module, which cannot be copied."""
    flags = "--trainer.profiler pytorch --model.per_class true"
    assert train(flags, "--trainer.max_steps 3")["steps"] == 3


def test_a_strategy_by_its_class(monkeypatch, train: Train):
    made = []
    monkeypatch.setattr(DDPStrategy, "__init__", lambda *_: made.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy")
    assert made


class Manual(PlainModule):
    """A module that steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Download(PlainData):
    """Data that has to be downloaded, without a network."""

    def prepare_data(self) -> None:
        raise URLError("no network")


OF_USER = "--data plain.PlainData --model test_foreign_code."


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{OF_USER}Manual --trainer.gradient_clip_val 1", "gradient_clip_val"),
        (f"{OF_USER}Manual --trainer.accumulate_grad_batches 2", "accumulate_grad"),
        (
            "--model plain.PlainModule --data test_foreign_code.Download",
            "a download failed",
        ),
        ("--model Clasifier", "model 'Clasifier' cannot be imported"),
        (f"{ON_TINY} --model.metrics.m torchmetrics.text.BLEUScore", "metric m"),
        (
            f"{ON_TINY} --model.criterion torch.nn.CrossEntropyLoss "
            "--model.criterion.reduction none",
            "loss must be a scalar",
        ),
        (
            f"{ON_TINY} --trainer.profiler lightning.pytorch.profilers.Profiler",
            "abstract",
        ),
        (
            f"{ON_TINY} --model.metrics.auc torchmetrics.classification.BinaryAUROC",
            "metric auc",
        ),
        (
            f"{ON_TINY} --trainer.strategy lightning.pytorch.strategies.DDP",
            "trainer.strategy",
        ),
        (
            f"{ON_TINY} --model.metrics.t torchmetrics.wrappers.MetricTracker",
            "MetricTracker",
        ),
    ],
)
def test_mistakes_in_foreign_code_are_told_in_a_few_lines(
    tmp_path, capsys, flags, words
):
    with pytest.raises(SystemExit):
        script("train").main(argv("--trainer.default_root_dir", tmp_path, flags))
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) <= 6
    assert not [*tmp_path.glob("*/version_*")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--trainer.check_val_every_n_epoch 5",
            "best.ckpt is the last epoch (trainer.check_val_every_n_epoch 5 is above",
        ),
    ],
)
def test_a_line_for_what_has_no_effect(train: Train, capsys, flags, words):
    train(flags)
    assert words in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:User provided device_type:UserWarning")
def test_evaluate_has_the_precision_of_a_plugin(train: Train, tmp_path):
    """It was ignored: the test was repeated in float32."""
    plugin = "--trainer.plugins MixedPrecision --trainer.plugins.precision bf16-mixed"
    metrics = train(f"{plugin} --trainer.plugins.device cpu --trainer.max_epochs 1")
    best = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    tested = script("evaluate").main(["--ckpt_path", str(best)])
    assert tested["test/loss"] == metrics["test/loss"]


def test_a_loss_of_timm_gets_no_classes():
    """Only the networks of timm take them in **kwargs."""
    pytest.importorskip("timm")
    loss = spec_of("--model.criterion=timm.loss.JsdCrossEntropy")
    assert not loss.config.model.init_args.criterion.get("dict_kwargs")
