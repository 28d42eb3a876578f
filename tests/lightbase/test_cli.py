"""Mistakes on the command line and in configs, and what --help and --print_config show."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError

import programs
import pytest
import torch
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import LightningDataModule, LightningModule
from paths import HERE, TINY, words
from torch import nn
from torchvision import tv_tensors

from lightbase.run.train import main, parse

Train = Callable[..., dict[str, Any]]
TEXT = Path(TINY).read_text()
EARLY_STOPPING = """\
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val/loss, patience: 3}
"""


def script(name: str) -> Callable[..., Any]:
    """The main function of a script."""
    return runpy.run_path(str(HERE / "scripts" / f"{name}.py"))["main"]


def fails(capsys: pytest.CaptureFixture[str], status: int, run: Callable[[], Any]) -> str:
    with pytest.raises(SystemExit) as caught:
        run()
    error = capsys.readouterr().err.rstrip("\n")
    assert caught.value.code == status, error
    assert 1 <= len(error.splitlines()) <= 2, error
    assert error.startswith("error: ")
    return error


# a command line, and what its error names
WRONG_FLAGS = """
--trainer.max_epoch 3 | --trainer.max_epoch; | --trainer.max_epochs?
--figures_every_n_epochs -1 | figures_every_n_epochs: | -1 | >=0
--data.batchsize 3 | data.batchsize | batch_size?
--model.net.size [1] | model.net.size | sizes?
--modle.lr 1 | --modle.lr | --model.lr?
--nam x | --nam; | --name?
--foo=1 | --foo
--model.parameter_groups.layers.1.lr 0.1 | --model.parameter_groups.layers.1 "{lr: 0.1}"
--model.init_args.parameter_groups.*.bias.lr=3 | --model.parameter_groups.*.bias "{lr: 3}"
stray | unknown argument stray
--data.batch_size -3 | data.batch_size: | -3 | >0
--data.batch_size 2.5 | data.batch_size | 2.5
--data.num_workers -1 | data.num_workers: | -1 | >=0
--data.pin_memory 5 | data.pin_memory: '5' | bool
--data.batch_size null | data.batch_size: | null
--model.lr null | model.lr: | null
--model.optimizer null | model.optimizer: | str | None
--model.net.sizes null | model.net.sizes: | list | None
--trainer.num_nodes null | trainer.num_nodes | None
--model.lr -1 | model.lr: | -1 | >0
--model.lr fast | model.lr: | 'fast' | Float
--model.lr inf | model.lr: inf | out of range
--model.lr nan | model.lr: | nan | >0
--model.scheduler_interval batch | batch | 'epoch', 'step'
--model.optimizer Addam | Addam | Adam?
--model.optimizer_args.amsgrat 1 | amsgrat | amsgrad?
--model.optimizer_args 5 | model.optimizer_args: '5' | dict
--model.scheduler CosineAnealingLR | CosineAnealingLR | CosineAnnealingLR?
--model.net example.models.mlp.MPL | MPL | MLP?
--model.net example.model.mlp.MLP | example.model' | example.models.mlp?
--model.net nowhere.Net | model.net: | 'nowhere'
--model.net MLP | MLP | example.models.mlp.MLP
--model.net example.data.synthetic.SyntheticImages | SyntheticImages | Module
--model.net.sizes abc | model.net.sizes: | list | abc
--model.net.activation foo | foo | relu
--model.net.activation null | model.net.activation: | null
--model.scheduler None | model.scheduler: | null
--name None | name: | null
--model.optimizer_args.betas [0.9] | Adam | betas
--model.net.sizes [192] | [192]
--data example.data.synthetic.SyntheticImage | SyntheticImage' | SyntheticImages?
--data example.models.mlp.MLP | data: 'example.models.mlp.MLP' | LightningDataModule
--trainer.max_epochs five | trainer.max_epochs: 'five' | int
--trainer.max_epochs -5 | max_epochs | -5
--trainer.min_epochs -1 | trainer.min_epochs: '-1' | >=0
--trainer.num_sanity_val_steps -2 | trainer.num_sanity_val_steps: '-2' | >=-1
--trainer.gradient_clip_val -1 | trainer.gradient_clip_val: '-1' | >=0
--trainer.accumulate_grad_batches 0 | trainer.accumulate_grad_batches: | 0 | >0
--trainer.check_val_every_n_epoch 0 | trainer.check_val_every_n_epoch: '0' | >0
--trainer.val_check_interval 0 | val_check_interval 0
--seed_everything null | seed_everything | None
--trainer.max_epochs | --trainer.max_epochs
--config | --config | expected one argument
--trainer 5 | trainer: | '5'
--trainer.accelerator 5 | accelerator | '5' | cpu
--trainer.precision 17 | 17 | 16-mixed
--trainer.accelerator foo | foo | cpu
--trainer.limit_val_batches 2.5 | limit_val_batches | 2.5
--trainer.max_time abc | abc
--trainer.callbacks Foo | Foo
--trainer.callbacks mine.Foo | No module named 'mine'
--seed_everything abc | abc
--seed_everything -4 | seed_everything: '-4' | >=0
--patience 0 | patience: '0' | >0
--monitor val/f1 | val/f1 | val/acc
--name ../x | ../x
--data.val_fraction 1 | data.val_fraction: | 1 | <1
--model.compile_net= | compile_net '' | inductor
--trainer.devices abc | abc
--patience 3 --data.val_fraction 0 | --patience 3 | val_fraction
--model.scheduler ReduceLROnPlateau --data.val_fraction 0 | ReduceLROnPlateau | val_fraction
"""


@pytest.mark.parametrize("line", WRONG_FLAGS.strip().splitlines())
def test_a_wrong_flag(train: Train, tmp_path: Path, capsys: Any, line: str) -> None:
    flags, *expected = line.split(" | ")
    error = fails(capsys, 2, lambda: train(*flags.split()))
    for part in expected:
        assert part in error
    assert not list(tmp_path.iterdir())


# a command line, and what its error names
DOES_NOT_FIT = """
--trainer.accelerator gpu | gpu | cpu
--trainer.accelerator auto --trainer.devices 2 | 2 | --trainer.strategy ddp
--trainer.accelerator auto --trainer.devices [1] | [1] | --trainer.devices 1
--trainer.devices 0 | 0
--trainer.num_nodes 2 | trainer.num_nodes 2 | torchrun
--trainer.devices 999 --trainer.strategy ddp | 999
--ckpt_path last | last | tiny
--ckpt_path best | best | tiny
--ckpt_path none.ckpt | none.ckpt
--data.batch_size 1000 | 1000 | 315
--model.net.sizes [191,4] | MLP | (3, 8, 8)
--model.net.sizes [192,3] | 3 outputs | 4 classes
--model.net.sizes [192,9] | 9 outputs | 4 classes
--model.net torch.nn.Embedding --model.net.num_embeddings=4 --model.net.embedding_dim=4 | Long
--model.net torch.nn.GRUCell --model.net.input_size=9 --model.net.hidden_size=4 | GRUCell
--model.net torch.nn.ParameterList | ParameterList | (3, 8, 8)
--model.net test_cli.Broken --model.net.where below | Broken | (3, 8, 8)
"""


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("line", DOES_NOT_FIT.strip().splitlines())
def test_what_is_not_there_or_does_not_fit(train, tmp_path, capsys, line, monkeypatch):
    monkeypatch.setattr("lightbase.devices.devices.num_gpus", lambda: 0)
    flags, *expected = line.split(" | ")
    error = fails(capsys, 1, lambda: train(*flags.split()))
    for part in expected:
        assert part in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["is empty"]),
        ("\n# nothing\n", ["is empty"]),
        ("hello", ["str"]),
        ("- 1\n- 2\n", ["list"]),
        ("a: [1\nb: }", ["line 2"]),
        ("trainer: 5\n", ["trainer", "5"]),
        ("data: 5\n", ["data", "5"]),
        (b"\x00\x01\x02", ["YAML"]),
        (bytes(range(256)), ["decode byte 0x80"]),
        (TEXT.replace("max_epochs", "max_epoch"), ["trainer.max_epoch", "max_epochs?"]),
        (TEXT.replace("sizes:", "size:"), ["size", "sizes?"]),
        (TEXT + "modle: 3\n", ["modle", "model?"]),
        (TEXT + "trainer: {max_epochs: 9}\n", ["'trainer' stands twice", "line 27"]),
        (
            TEXT + EARLY_STOPPING.replace("monitor", "monitr"),
            ["trainer.callbacks.monitr", "monitor?"],
        ),
        (TEXT + EARLY_STOPPING.replace("3", "abc"), ["trainer.callbacks.patience: ", "int", "abc"]),
        (
            "model: {class_path: example.classifier.Classifier, lr: 3}",
            ["model.class_path: ", "init_args"],
        ),
        (
            "data: {clas_path: example.data.synthetic.SyntheticImages}",
            ["data.clas_path", "class_path?"],
        ),
        (TEXT.replace("0.01", ""), ["model.lr: ", "null"]),
        (TEXT.replace("lr: 0.01", "lr: .inf"), ["model.lr: inf", "out of range"]),
        (TEXT + "seed_everything:\n", ["seed_everything: null"]),
        (TEXT + "  gradient_clip_val: .inf\n", ["trainer.gradient_clip_val: inf"]),
        (
            TEXT
            + EARLY_STOPPING.replace("EarlyStopping", "ModelCheckpoint").replace(
                "patience: 3", "save_last: true"
            ),
            ["ModelCheckpoint", "save_last"],
        ),
        (
            TEXT + EARLY_STOPPING + EARLY_STOPPING.split("\n", 1)[1],
            ["more than one", "EarlyStopping"],
        ),
        (TEXT.replace("sizes: [192, 16, 4]", "sizes:"), ["model.net: ", "required: sizes"]),
        (TEXT.split("model:")[0] + "data:" + TEXT.split("data:")[1], ["model: ", "required: net"]),
        (TEXT.split("data:")[0], ["required: data"]),
    ],
)
def test_a_wrong_config(train, tmp_path, capsys, text, expected):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    error = fails(capsys, 2, lambda: train(config=str(path)))
    for part in expected:
        assert part in error
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.yaml"]


def test_a_missing_config_names_the_nearest(capsys: Any) -> None:
    assert "tiny.yaml?" in fails(
        capsys, 2, lambda: main(["--config", TINY.replace("tiny", "tinny")])
    )
    folder = str(Path(TINY).parent)
    assert folder in fails(capsys, 2, lambda: main(["--config", folder]))


@pytest.mark.parametrize("root", ["file", "file/below", "/proc/nowhere"])
@pytest.mark.linux
def test_a_log_folder_that_cannot_be_written(train, tmp_path, capsys, root):
    (tmp_path / "file").write_text("")
    path = root if root.startswith("/") else str(tmp_path / root)
    assert path in fails(capsys, 1, lambda: train("--trainer.default_root_dir", path))


class Broken(nn.Module):
    """A network with a bug of its own."""

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.where = where
        if where == "init":
            raise KeyError("a bug")

    def forward(self, x: Any) -> Any:
        if self.where == "below":
            return nn.Linear(5, 4)(x)
        if self.where == "call":
            return nn.functional.relu("x")  # type: ignore[arg-type]
        raise {"forward": RuntimeError, "value": ValueError}[self.where]("a bug")


@pytest.mark.parametrize(
    ("where", "error"),
    [("init", KeyError), ("forward", RuntimeError), ("value", ValueError), ("call", TypeError)],
)
def test_a_bug_in_the_users_code_keeps_its_traceback(train, monkeypatch, where, error):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(error, match="a bug" if where != "call" else "relu") as caught:
        train("--model.net", "test_cli.Broken", "--model.net.where", where)
    assert Path(__file__) in [entry.path for entry in caught.traceback[-2:]]


def fetches(num_classes: int = 4, url: str = "", weights: str | None = None) -> nn.Module:
    """As torchvision's functions do, which build a network and fetch its weights."""
    if url:
        raise URLError(f"{url} cannot be reached")
    return nn.Linear(no_such_name, num_classes)  # type: ignore[name-defined]  # noqa: F821


def test_a_network_that_a_function_builds(train: Train, tmp_path: Path, capsys: Any) -> None:
    """Two lines for torchvision's no and for files that cannot be fetched, a traceback for a bug of
    the user's."""
    resnet = ("--model.net", "torchvision.models.resnet18", "--model.net.weights", "DEFAULT")
    error = fails(capsys, 2, lambda: train(*resnet))
    assert (
        "the config does not fit: The parameter 'num_classes' expected value 1000 but got 4 "
        "instead." in error
    )
    own = ("--model.net", "test_cli.fetches")
    error = fails(
        capsys,
        1,
        lambda: train(*own, "--model.net.url", "http://here", "--model.net.weights", "DEFAULT"),
    )
    assert "cannot be had: <urlopen error http://here cannot be reached>" in error
    with pytest.raises(NameError, match="no_such_name") as caught:
        train(*own)
    assert Path(__file__) in [entry.path for entry in caught.traceback]
    assert not list(tmp_path.iterdir())


def printed(capsys: Any, *args: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        main([*args, "--print_config"])
    assert not caught.value.code
    return yaml.safe_load(capsys.readouterr().out)


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small default experiment."""
    path = tmp_path / "default.yaml"
    path.write_text(
        TEXT.replace("optimizer: Adam", "optimizer: SGD\n  optimizer_args: {momentum: 0.9}")
    )
    monkeypatch.setattr("lightbase.folder.Project.default_config", path)


@pytest.mark.usefixtures("default")
def test_the_default_experiment_does_not_leak_into_a_config(capsys: Any) -> None:
    assert printed(capsys)["model"]["init_args"]["optimizer_args"] == {"momentum": 0.9}
    own = printed(capsys, "--config", TINY)
    assert own["model"]["init_args"]["optimizer"] == "Adam"
    assert not own["model"]["init_args"].get("optimizer_args")
    assert own["name"] == "tiny"


def test_flags_win_over_configs_wherever_they_stand_and_later_configs_over_earlier(
    capsys, tmp_path
):
    more = tmp_path / "more.yaml"
    more.write_text("model: {lr: 0.5}\ntrainer: {max_epochs: 7}\n")
    found = printed(capsys, "--trainer.max_epochs", "9", "--config", TINY, "--config", str(more))
    assert found["model"]["init_args"]["lr"] == 0.5
    assert found["model"]["init_args"]["optimizer"] == "Adam"
    assert found["trainer"]["max_epochs"] == 9


def test_any_argument_of_data_model_and_trainer_is_a_flag(capsys: Any) -> None:
    found = printed(
        capsys,
        *("--config", TINY, *words("--data.batch_size 256 --data.data_dir x --model.lr 0.1")),
        *words(
            "--model.optimizer SGD --model.optimizer_args.momentum 0.9 "
            "--model.optimizer_args.nesterov=true --trainer.gradient_clip_val 1 "
            "--seed_everything 7 --name try2 --model.net.sizes [2,3]"
        ),
    )
    data, model = found["data"]["init_args"], found["model"]["init_args"]
    assert (data["batch_size"], data["data_dir"], model["lr"], found["seed_everything"]) == (
        256,
        "x",
        0.1,
        7,
    )
    assert model["optimizer_args"] == {"momentum": 0.9, "nesterov": True}
    assert model["net"]["init_args"]["sizes"] == [2, 3]
    assert found["trainer"]["gradient_clip_val"] == 1


def test_callbacks_of_a_second_config_replace_the_firsts_with_a_line_or_are_added(capsys, tmp_path):
    stop, save = tmp_path / "stop.yaml", tmp_path / "save.yaml"
    stop.write_text("trainer:\n" + EARLY_STOPPING)
    names = []
    for key in ("callbacks", "callbacks+"):
        save.write_text(
            f"trainer: {{{key}: [{{class_path: lightning.pytorch.callbacks.ModelCheckpoint}}]}}"
        )
        cli = parse(["--config", TINY, "--config", str(stop), "--config", str(save)])
        names.append([type(callback).__name__ for callback in cli.config_init.trainer.callbacks])
        assert capsys.readouterr().out.count(f"Callbacks: --config {save} replaces") == (
            key == "callbacks"
        )
    assert names == [["ModelCheckpoint"], ["EarlyStopping", "ModelCheckpoint"]]
    parse(
        [
            "--config",
            TINY,
            "--config",
            str(stop),
            "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
        ]
    )
    assert "Callbacks: --trainer.callbacks" in capsys.readouterr().out


def test_early_stopping_and_checkpoints_of_the_users_beside_ours(train, tmp_path, capsys):
    config = tmp_path / "both.yaml"
    text = EARLY_STOPPING.replace("patience: 3", "patience: 1, min_delta: 100")
    config.write_text(TEXT.replace("max_epochs: 2", "max_epochs: 5") + text + """\
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val/loss, save_top_k: 2}
""")  # fmt: skip
    assert train("--patience", 3, config=str(config))["epochs"] == 2
    files = {path.name for path in (tmp_path / "tiny" / "version_0" / "checkpoints").iterdir()}
    assert files == {"best.ckpt", "last.ckpt", "epoch=0-step=19.ckpt", "epoch=1-step=38.ckpt"}
    config.write_text(TEXT + EARLY_STOPPING.replace("val/loss", "val_loss"))
    assert "val_loss" in fails(capsys, 1, lambda: train(config=str(config)))


def test_one_batch_is_not_all_batches(capsys: Any, tmp_path: Path) -> None:
    flags = words(
        "--trainer.limit_val_batches 1 --trainer.val_check_interval 3 --trainer.limit_test_batches"
    )
    found = printed(capsys, "--config", TINY, *flags, "0.5")["trainer"]
    assert [
        found[key] for key in ("limit_val_batches", "val_check_interval", "limit_test_batches")
    ] == [1, 3, 0.5]
    assert isinstance(found["limit_val_batches"], int)
    config = tmp_path / "one.yaml"
    config.write_text("trainer: {limit_test_batches: 1, limit_val_batches: 1.0}")
    found = printed(capsys, "--config", TINY, "--config", str(config))["trainer"]
    assert isinstance(found["limit_test_batches"], int)
    assert isinstance(found["limit_val_batches"], float)


def test_help_fits_on_two_screens_and_names_the_common_flags() -> None:
    # in a process of its own: it lists the classes that are imported, also by other tests
    command = [sys.executable, str(HERE / "scripts" / "train.py"), "--help"]
    with programs.start(command, stdout=subprocess.PIPE) as process:
        text, _ = process.communicate(timeout=60)
    assert len(text.splitlines()) < 120
    for flag in words(
        "--config --ckpt_path --trainer.precision --data --model --patience --monitor"
    ):
        assert flag in text


@pytest.mark.usefixtures("default")
def test_the_default_run_says_so_in_its_first_lines_with_the_command_for_real_data(
    capsys, tmp_path
):
    main(["--trainer.default_root_dir", str(tmp_path), "--trainer.fast_dev_run", "true"])
    first = capsys.readouterr().out.splitlines()[:2]
    assert first[0].endswith("default.yaml: For tests: trains in a second.")
    assert "python scripts/train.py --config configs/" in first[1]


class OwnSystem(LightningModule):
    """A system that is no Classifier: own arguments, own defaults, hyper-parameters that are not
    plain, no `net`."""

    built: ClassVar[list[Any]] = []

    def __init__(
        self, num_inputs: int, lr: float = 0.25, optimizer: str = "own", where: Path = Path("x")
    ) -> None:
        super().__init__()
        # safe loading refuses both
        mean, activation = tv_tensors.Image(torch.rand(3, 1, 1)), nn.ReLU().forward
        self.save_hyperparameters("num_inputs", "lr", "optimizer", "where")
        self.save_hyperparameters({"mean": mean, "activations": [activation, {1: activation}]})
        self.linear = nn.Linear(num_inputs, 4)
        self.built.append((lr, optimizer))

    def _step(self, batch: Any, stage: str) -> Any:
        loss = nn.functional.cross_entropy(self.linear(batch[0].flatten(1)), batch[1])
        self.log(f"{stage}/loss", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch, "test")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class OwnClassifier(Classifier):
    def __init__(
        self, net: nn.Module, optimizer: str = "AdamW", lr: float = 0.5, **kwargs: Any
    ) -> None:
        super().__init__(net, lr=lr, optimizer=optimizer, **kwargs)


class OwnImages(SyntheticImages):
    def __init__(self, batch_size: int = 9, **kwargs: Any) -> None:
        super().__init__(batch_size=batch_size, **kwargs)


class OwnData(LightningDataModule):
    """Data that needs the Trainer in setup, takes no arguments and has no test set."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.data = torch.utils.data.TensorDataset(torch.rand(40, 3, 8, 8), torch.randint(4, (40,)))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, batch_size=8)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


SET_BY_CLASSES = ("optimizer", "lr", "batch_size")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.usefixtures("own")
def test_a_system_of_ones_own_keeps_its_defaults_and_works_through_to_evaluation(train, tmp_path):
    config = tmp_path / "own.yaml"
    data = TEXT.split("data:")[1]
    model = "{class_path: test_cli.OwnSystem, init_args: {num_inputs: 192}}"
    config.write_text(f"name: own\nmodel: {model}\ndata:{data}")
    result = train("--monitor", "val/loss", config=str(config))
    import test_cli

    assert test_cli.OwnSystem.built == [(0.25, "own")]
    path = tmp_path / "own" / "version_0" / "checkpoints" / "best.ckpt"
    assert script("evaluate")(["--ckpt_path", str(path)]) == {"test/loss": result["test/loss"]}
    train(*words("--monitor val/loss --ckpt_path last --trainer.max_epochs 3"), config=str(config))
    with pytest.raises(SystemExit) as caught:
        script("predict")(["--ckpt_path", str(path), "x.png"])
    assert caught.value.code == 1


MINE = """\
import torch
from lightning import LightningDataModule, LightningModule

class Mine(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.layer, self.optimizer, self.lr = torch.nn.Linear(4, 1), torch.optim.Adam, lr

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.lr)

class MyData(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(16, 4), batch_size=8)
"""


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_model_and_data_in_the_working_folder_named_by_flags(tmp_path, monkeypatch, capsys):
    (tmp_path / "named_by_flags.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    flags = words(
        "--model named_by_flags.Mine --data=named_by_flags.MyData --trainer.default_root_dir runs"
    )
    main([*flags, "--trainer.max_epochs", "1", "--device_monitor", "false"])
    assert "No --config given" not in capsys.readouterr().out
    folder = tmp_path / "runs" / "Mine" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"] == {"lr": 0.1}
    assert config["trainer"]["log_every_n_steps"] == 100  # the default experiment has 50
    assert main([*flags, "--trainer.max_epochs", "2", "--ckpt_path", "last"])["epochs"] == 2
    path = str(folder / "checkpoints" / "best.ckpt")
    assert "the data has none" in fails(
        capsys, 1, lambda: script("evaluate")(["--ckpt_path", path])
    )
    script("export")(["--ckpt_path", path])


def test_the_repositorys_root_is_importable_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if Path(path) != HERE])
    parse(["--config", TINY])
    assert str(HERE) in sys.path


def test_a_switch_needs_no_true(capsys: Any) -> None:
    flags = words("--trainer.fast_dev_run --keep_every_epoch --step_timer false")
    found = printed(capsys, "--config", TINY, *flags)
    assert found["trainer"]["fast_dev_run"] is True
    assert found["keep_every_epoch"] is True
    assert found["step_timer"] is False


@pytest.mark.usefixtures("own")
def test_classes_of_ones_own_over_a_config_of_others(train, tmp_path, capsys):
    config = tmp_path / "short.yaml"
    lines = [line for line in TEXT.splitlines() if line.split(":")[0].strip() not in SET_BY_CLASSES]
    config.write_text("\n".join(lines))
    flags = words("--model test_cli.OwnClassifier --data test_cli.OwnImages")
    parsed = printed(capsys, "--config", str(config), *flags)
    assert parsed["model"]["class_path"] == "test_cli.OwnClassifier"
    assert parsed["model"]["init_args"]["optimizer"] == "AdamW"
    assert parsed["model"]["init_args"]["lr"] == 0.5
    assert parsed["data"]["class_path"] == "test_cli.OwnImages"
    train(*flags, config=str(config))


@pytest.mark.usefixtures("own")
def test_a_data_module_of_ones_own_without_a_test_set(train: Train, tmp_path: Path) -> None:
    train("--data", "test_cli.OwnData", "--trainer.log_every_n_steps", 1)
    metrics = (tmp_path / "tiny" / "version_0" / "metrics.json").read_text()
    assert "test/acc" not in metrics
    assert '"epochs": 2' in metrics


@pytest.mark.parametrize("logger", ["CSVLogger", "TensorBoardLogger"])
def test_a_logger_of_ones_own(train: Train, tmp_path: Path, logger: str) -> None:
    name = f"lightning.pytorch.loggers.{logger}"
    place = f"--trainer.logger.save_dir={tmp_path / 'own'}"
    train("--trainer.logger", name, place, "--trainer.logger.name=x")
    assert list((tmp_path / "own" / "x" / "version_0").iterdir())
    assert (tmp_path / "tiny" / "version_0" / "metrics.json").exists()


def test_a_failed_resume_leaves_the_config_of_the_run(train, tmp_path, capsys):
    train()
    config = tmp_path / "tiny" / "version_0" / "config.yaml"
    before = config.read_text()
    flags = words("--ckpt_path last --trainer.max_epochs 4 --trainer.limit_train_batches 0.0001")
    with pytest.raises(SystemExit):
        train(*flags)
    assert config.read_text() == before


# a command line, and what its error names
MORE_WRONG_FLAGS = """
--trainer.val_check_interval 1000 | val_check_interval
--trainer.accelerator tpu | trainer flags
--model.scheduler StepLR --model.scheduler_args.step_size 0 | StepLR
--model.scheduler ExponentialLR --model.scheduler_args.gamma abc | abc
--model.optimizer SparseAdam | SparseAdam
--monitor train/foo --patience 2 | train/foo
--monitor val/f1 --trainer.num_sanity_val_steps 0 | val/f1
--model.scheduler CosineAnnealingLR --trainer.max_epochs -1 | CosineAnnealingLR
"""


@pytest.mark.slow
@pytest.mark.parametrize("line", MORE_WRONG_FLAGS.strip().splitlines())
def test_more_wrong_flags(train: Train, capsys: Any, line: str) -> None:
    flags, expected = line.split(" | ")
    assert expected in fails(capsys, 2, lambda: train(*flags.split()))


@pytest.mark.parametrize(
    "text", ["a: &a [*a]", "model: {net: 5}", "data: {init_args: null}", "model: {init_args: 5}"]
)
def test_odd_yaml(train: Train, tmp_path: Path, capsys: Any, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    assert len(fails(capsys, 2, lambda: train("--config", path))) < 400


class Implicit(MLP):
    """Has a default that its type does not take."""

    def __init__(
        self,
        sizes: list[int],
        width: int = None,  # type: ignore[assignment]  # noqa: RUF013
        act: str = None,  # type: ignore[assignment]  # noqa: RUF013
    ) -> None:
        super().__init__(sizes)


@pytest.mark.usefixtures("own")
def test_null_is_a_value_where_the_type_has_it(train: Train) -> None:
    flags = words("--model.scheduler null --trainer.max_epochs null --trainer.max_steps 3")
    own = ("--model.net", "test_cli.Implicit", "--model.net.sizes", "[192,4]")
    assert train(*flags, *own)["steps"] == 3


def test_a_drawn_seed_is_another_one_each_time_and_is_noted(train, tmp_path):
    for _ in range(2):
        train("--seed_everything", "true", "--trainer.max_epochs", 1)
    configs = [yaml.safe_load(path.read_text()) for path in tmp_path.rglob("config.yaml")]
    assert len({config["seed_everything"] for config in configs}) == 2
