"""Modules, networks, metrics, callbacks, strategies and plugins of other packages."""

from urllib.error import URLError

import pytest
import torch
from lightning import LightningModule
from paths import TINY, Train, argv, script
from plain import PlainData, PlainModule

from lightbase.config.spec import (
    CommandLine,
    RunSpec,
    as_yaml,
    check_round_trip,
    new_spec,
    validate,
)
from lightbase.setup.build import fill_in

WATCHED = "--device_monitor=true --step_timer=true --figures_every_n_epochs=1"
ON_TINY = f"--config {TINY}"
FACTS = {"num_classes": 4, "image_shape": [3, 8, 8], "in_channels": 3, "in_chans": 3}


def spec_of(*args: str) -> RunSpec:
    spec = new_spec(CommandLine(["--config", TINY, *args]))
    fill_in(spec, FACTS)
    validate(spec, spec.config)
    return spec


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "googlenet"])
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


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_profiler_of_pytorch(train: Train):
    """It adds hooks to the metrics of the module, which cannot be copied."""
    flags = "--trainer.profiler pytorch --model.per_class true"
    assert train(flags, "--trainer.max_steps 3")["steps"] == 3


class Annotated(LightningModule):
    """A module whose optimizer has the type of an object, as in some templates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()


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
        (f"{OF_USER}Annotated --model.optimizer Adam", "OptimizerCallable"),
        (f"{OF_USER}Manual --trainer.gradient_clip_val 1", "gradient_clip_val"),
        (
            "--model plain.PlainModule --data test_foreign_code.Download",
            "a download failed",
        ),
        ("--model plain.PlainModule", "names no data"),
        (f"{ON_TINY} --model.metrics.m torchmetrics.text.BLEUScore", "metric m"),
        (f"{ON_TINY} --model.criterion torch.nn.CTCLoss", "CTCLoss.forward() missing"),
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
            f"{ON_TINY} --model.metrics.t torchmetrics.wrappers.MetricTracker",
            "not a subclass of Metric",
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
