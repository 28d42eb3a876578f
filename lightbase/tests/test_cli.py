"""Mistakes on the command line and in configs, and what --help and --print_config
show."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError

import pytest
import yaml
from paths import HERE, TINY, argv, fails, script
from torch import nn

from lightbase.commands.flags import help_of_train
from lightbase.commands.train import main
from lightbase.config.parser import FLAGS

TEXT = Path(TINY).read_text()
EARLY_STOPPING = """\
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val/loss, patience: 3}
"""


# a command line, and what its error names
WRONG_FLAGS = """
--data.batchsize 3 | data.batchsize | batch_size?
--model.net.size [1] | model.net.size | sizes?
--modle.lr 1 | --modle.lr | --model.lr?
--model.parameter_groups.layers.1.lr 0.1 | model.parameter_groups: | dict
stray | unknown argument 'stray'; a config file needs --config
--config nowhere.yaml | config nowhere.yaml: No such file
--model.scheduler LRScheduler | 'LRScheduler' | did you mean ChainedScheduler?
--monitor= | --monitor_mode max or min
--model.optimizer=Adagrad --model.optimizer_args.maximize=1 | model.optimizer Adagrad with {'maximize': 1}
--model.lr null | model.lr: | null
--model.optimizer Addam | Addam | Adam?
--model.optimizer_args.amsgrat 1 | amsgrat | it takes lr, betas
--model.metrics.class_acc torchmetrics.MeanMetric --model.per_class true | metrics.class_acc
--model.net example.models.mlp.MPL | MPL | MLP?
--device cpu | did you mean --trainer.accelerator?
--cpu | did you mean --trainer.accelerator cpu?
--logger wandb | did you mean --trainer.logger?
fit --model.lr 1 | unknown argument 'fit'; leave fit out
--trainer.logger csv | 'csv' | such as lightning.pytorch.loggers.CSVLogger
--trainer.callbacks EarlyStop | such as lightning.pytorch.callbacks.EarlyStopping
--data ImageFolder | data.data_dir:
--model.net resnet18 | such as torchvision.models.resnet18
--model.net MPL | 'MPL' | did you mean example.models.mlp.MLP?
--model.help nowhere.X | No module named 'nowhere'
--learning_rate 1 | unknown argument --learning_rate; did you mean --model.lr?
--epochs 1 | did you mean --trainer.max_epochs?
--model.net.sizes 192,4 | a list has brackets: [192,4]
--model.net example.data.synthetic.SyntheticImages | SyntheticImages | Module
--model.optimizer_args.betas [0.9] | Adam | betas
--trainer.devices 0 --trainer.accelerator cpu | devices='0'
--model.net.sizes null | model.net.sizes: | There is no value
--model.metrics.f1 torchmetrics.F1Score | model.metrics.task: | no value
--trainer.max_epochs | --trainer.max_epochs
--model.net torchvision.models.alexnet --model.net.classes 9 | num_classes?
--model.scheduler SequentialLR | it takes schedulers
--model.net torchvision.models.resnet18 --model.net.weights DEFAULT | 1000 but got 4
--config | --config | expected one argument
--trainer 5 | trainer: | '5'
--monitor val/f1 | val/f1 | val/acc
--name=a/version_0 | not a name for a folder below
--model.scheduler ExponentialLR --model.scheduler_args.gamma abc | abc
--model.scheduler CosineAnnealingLR --trainer.max_epochs -1 | CosineAnnealingLR
--patience 3 --data.val_fraction 0 | --patience 3 | val_fraction
--model.net.sizes [191,4] | MLP | (3, 8, 8)
--model.net test_cli.Broken --model.net.where below | Broken | (3, 8, 8)
"""


# a command line, and what its error names
DOES_NOT_FIT = """
--model.net torch.nn.Embedding --model.net.num_embeddings=4 --model.net.embedding_dim=4 | Long | Embedding(4, 4) got
--trainer.accelerator gpu | gpu | cpu
--trainer.devices 999 --trainer.strategy ddp | 999
--ckpt_path last | last | tiny
--ckpt_path none.ckpt | none.ckpt
--model.weights none.pth | none.pth cannot be read
--model.num_classes 9 | 4 outputs | model.num_classes 9
--data.batch_size 1000 | 1000 | 315
--model.net test_cli.fetches --model.net.url http://x | http://x | a download failed
--model.net test_cli.fetches --model.net.file x.pth | error: x.pth
"""


@pytest.mark.parametrize(
    ("status", "line"),
    [(2, line) for line in WRONG_FLAGS.strip().splitlines()]
    + [(1, line) for line in DOES_NOT_FIT.strip().splitlines()],
)
def test_two_lines_for_a_command_line(
    train, tmp_path, capsys, monkeypatch, status, line
):
    monkeypatch.setattr("lightbase.run.devices.num_gpus", lambda: 0)
    flags, *expected = line.split(" | ")
    error = fails(capsys, status, lambda: train(*flags.split()))
    for part in expected:
        assert part in error
    assert not list(tmp_path.iterdir())


# a pattern in tiny.yaml, what takes its place, and what the error names
WRONG_CONFIGS = r"""
(?s).* |  | to hold keys with values
(?s).* | a: [1\nb: } | line 2
(?s).* | model: {class_path: Classifier, lr: 3} | model.class_path: | init_
(?s)data:.* |  | required: data
epochs: 2 | epochs: 1:30 | max_epochs: '1:30'
sizes: .* | sizes: | model.net.sizes: | no value
(?s)model:.*?data: | data: | model.net: there is no class; give --model.net CLASS
model: | model:\n  _target_: MLP | model._target_: write class_path in place of it
(?s)net:\n    class_path(.*?)\n      .*?\n | net:\n    _target_: MLP\n | model.net._target_: write class_path
(?s)data:.*?# | data: {_target_: a}\n# | data._target_: write class_path
(?s).* | defaults: [model: mlp] | defaults: configs are not composed here
(?s).* | fit: {model: {class_path: X}} | fit: leave fit out
\Z | trainer: {max_epochs: 9} | duplicate key 'trainer' | line 27
\Z |   callbacks: [{class_path: Timer, init_args: {intrval: step}}] | callbacks.intrval | interval?
\Z |   callbacks: [{class_path: ModelCheckpoint, init_args: {save_last: true}}] | a dirpath
\Z |   callbacks: [{class_path: Timer}, {class_path: Timer}] | more than one | Timer
"""


@pytest.mark.parametrize("line", WRONG_CONFIGS.strip().splitlines())
def test_a_wrong_config(train, tmp_path, capsys, line):
    pattern, new, *expected = line.split(" | ")
    new = new.encode().decode("unicode_escape")
    path = tmp_path / "wrong.yaml"
    path.write_text(re.sub(pattern, lambda _: new, TEXT, count=1))
    error = fails(capsys, 2, lambda: train(config=str(path)))
    for part in expected:
        assert part in error
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.yaml"]


class Broken(nn.Module):
    """A network with a bug of its own."""

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.where = where
        if where == "init":
            raise KeyError("a bug")

    def forward(self, x):
        if self.where == "below":
            return nn.Linear(5, 4)(x)
        raise ValueError("a bug")


def fetches(num_classes: int = 4, url: str = "", file: str = "") -> nn.Module:
    """As torchvision's functions do, which build a network and fetch its weights."""
    if file:
        raise FileNotFoundError(file)
    if url:
        raise URLError(f"{url} cannot be reached")
    return nn.Identity()


@pytest.mark.parametrize(
    ("net", "error"),
    [
        ("Broken --model.net.where init", KeyError),
        ("Broken", ValueError),
    ],
)
def test_a_bug_in_the_users_code_keeps_its_traceback(train, net, error):
    with pytest.raises(error, match="a bug") as caught:
        train(f"--model.net test_cli.{net}")
    assert Path(__file__) in [entry.path for entry in caught.traceback[-2:]]


@pytest.mark.parametrize("line", ["import sklearnn", "from os import nothing"])
def test_an_error_in_the_import_of_the_users_file_has_its_place(
    train, tmp_path, capsys, monkeypatch, line
):
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    name = f"broken_{len(line)}"  # Python remembers that there is no module
    file = tmp_path / f"{name}.py"
    file.write_text(f"import os\n{line}\n")
    error = fails(capsys, 2, lambda: train("--model.net", f"{name}.Net"))
    assert error.endswith(f"in {file}, line 2: {line}")


def printed(capsys, *args):
    with pytest.raises(SystemExit) as caught:
        main([*args, "--print_config"])
    assert not caught.value.code
    return yaml.safe_load(capsys.readouterr().out)


@pytest.fixture
def default(tmp_path, monkeypatch):
    """A small default experiment."""
    path = tmp_path / "default.yaml"
    path.write_text(
        TEXT.replace(
            "optimizer: Adam", "optimizer: SGD\n  optimizer_args: {momentum: 0.9}"
        )
    )
    monkeypatch.setattr("lightbase.config.paths.Project.default_config", path)


@pytest.mark.usefixtures("default")
def test_the_default_experiment_does_not_leak_into_a_config(capsys):
    assert printed(capsys)["model"]["init_args"]["optimizer_args"] == {"momentum": 0.9}
    own = printed(capsys, "--config", TINY)
    assert own["model"]["init_args"]["optimizer"] == "Adam"
    assert not own["model"]["init_args"].get("optimizer_args")


def test_flags_win_over_configs_and_later_configs_over_earlier(capsys, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text(
        "model: {lr: 0.5}\n"
        "trainer: {max_epochs: 7, limit_test_batches: 1, limit_val_batches: 1.0}"
    )
    before = "--trainer.max_epochs 9 --model.net.sizes [2,3] --trainer.fast_dev_run"
    flags = "--model.optimizer_args.betas=[0,1] --model.scheduler null"
    flags += " --trainer.limit_train_batches 1"
    config = printed(capsys, *argv(before, "--config", TINY, "--config", more, flags))
    model, trainer = config["model"]["init_args"], config["trainer"]
    assert (model["lr"], model["optimizer"], model["scheduler"]) == (0.5, "Adam", None)
    assert model["optimizer_args"] == {"betas": [0, 1]}
    assert model["net"]["init_args"]["sizes"] == [2, 3]
    assert trainer["max_epochs"] == 9
    assert trainer["fast_dev_run"] is True  # a switch needs no true
    # 1 is one batch, 1.0 is all
    limits = [trainer[f"limit_{split}_batches"] for split in ("train", "val", "test")]
    assert list(map(type, limits)) == [int, float, int]


def test_early_stopping_and_checkpoints_of_the_users_beside_ours(train, tmp_path):
    config = tmp_path / "both.yaml"
    text = EARLY_STOPPING.replace("patience: 3", "patience: 1, min_delta: 100")
    config.write_text(TEXT.replace("max_epochs: 2", "max_epochs: 5") + text + """\
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val/loss, save_top_k: 2}
""")  # fmt: skip
    assert train("--patience", 3, config=str(config))["epochs"] == 2
    files = (tmp_path / "tiny" / "version_0" / "checkpoints").iterdir()
    expected = "best.ckpt epoch=0-step=19.ckpt epoch=1-step=38.ckpt last.ckpt"
    assert sorted(path.name for path in files) == expected.split()


# a command without torch, and what it prints
AT_ONCE = """
train --help | --model.lr 0.01 | Discs | --trainer.max_epochs
evaluate --ckpt x | required: --ckpt_path
export --ckpt_path x | --ckpt_path x: no such file
"""


@pytest.mark.parametrize("line", AT_ONCE.strip().splitlines())
def test_help_and_flags_of_other_scripts_do_not_wait_for_torch(
    line, tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{HERE.parents[1]}")
    command, *expected = line.split(" | ")
    name, *flags = command.split()
    path = HERE / "scripts" / f"{name}.py"
    done = subprocess.run([sys.executable, path, *flags], capture_output=True)
    text = (done.stdout + done.stderr).decode()
    assert len(text.splitlines()) <= 60
    assert all(part in text for part in expected), text


def test_the_help_has_all_flags_but_that_of_earlier_versions():
    text = help_of_train()
    without = [name for name, *_ in FLAGS if f"\n--{name} " not in text]
    assert without == ["try_network"]


MINE = """\
import torch
from lightning import LightningDataModule, LightningModule
from pathlib import Path
from torch import nn
from torchvision import tv_tensors

class Mine(LightningModule):
    def __init__(self, lr: float = 0.1, where: Path = Path("x")):
        super().__init__()
        # safe loading refuses all three
        self.save_hyperparameters("lr", "where")
        self.save_hyperparameters({"mean": tv_tensors.Image(torch.rand(3, 1, 1))})
        self.save_hyperparameters({"activations": [nn.ReLU().forward]})
        self.layer, self.optimizer = nn.Linear(4, 1), torch.optim.Adam

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.layer(batch).mean())

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.hparams["lr"])

class MyData(LightningDataModule):
    def setup(self, stage):
        assert self.trainer is not None

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=8)
"""


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_model_and_data_in_the_working_folder_named_by_flags(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "named_by_flags.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    flags = "--model named_by_flags.Mine --data=named_by_flags.MyData"
    flags += " --trainer.default_root_dir runs --trainer.max_epochs"
    main(argv(flags, 1, "--device_monitor false"))
    assert "No --config given" not in capsys.readouterr().out
    folder = tmp_path / "runs" / "Mine" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"] == {"lr": 0.1, "where": str(tmp_path / "x")}
    assert config["trainer"]["log_every_n_steps"] == 100  # the default has 50
    result = main(argv(flags, 2, "--ckpt_path last"))
    assert result["epochs"] == 2
    assert "test/loss" not in result
    path = ["--ckpt_path", str(folder / "checkpoints" / "best.ckpt")]
    assert "the data has none" in fails(
        capsys, 1, lambda: script("evaluate").main(path)
    )
    script("export").main(path)
