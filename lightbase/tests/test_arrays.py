"""Data without a class: arrays, Datasets and DataLoaders in lightbase.train, and
predictions for arrays."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import seed_everything
from stops import Terminate
from torch.utils.data import DataLoader, TensorDataset
from written import equal, weights

import lightbase
from lightbase.config.errors import UserError
from lightbase.data.tensors import as_tensors

X = np.random.default_rng(0).normal(size=(100, 4))
Y = (X.sum(1) > 0).astype(int)
TENSORS = torch.tensor(X, dtype=torch.float32), torch.tensor(Y)


@pytest.fixture
def flags(tmp_path: Path) -> Any:
    quiet = {"device_monitor": False, "step_timer": False, "figures_every_n_epochs": 0}
    return {"default_root_dir": str(tmp_path), "max_epochs": 1, "name": "x", **quiet}


def module() -> Classifier:
    seed_everything(1, verbose=False)
    return Classifier(MLP([4, 8, 2]), num_classes=2, lr=0.1)


class Table:
    """What pandas has: NumPy reads it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values


def test_samples_of_each_kind_train_to_the_same_weights(
    tmp_path: Path, flags: Any, capsys: Any
) -> None:
    kinds = ((X, Y), TENSORS, (Table(X), Table(Y)), TensorDataset(*TENSORS))
    for number, data in enumerate(kinds):
        result = lightbase.train(module(), data, batch_size=30, **flags)
        out = capsys.readouterr().out
        assert "90 training, 10 validation samples" in out
        assert "No test: " in out
        assert result["steps"] == 3
        best = weights(tmp_path / "x" / f"version_{number}", "best")
        assert equal(result.module.state_dict(), best)
        assert equal(best, weights(tmp_path / "x" / "version_0", "best"))


def test_parts_are_used_as_they_are_given(flags: Any, capsys: Any) -> None:
    result = lightbase.train(
        module(), (X, Y), val=(X[:20], Y[:20]), test=(X[:7], Y[:7]), **flags
    )
    assert "100 training, 20 validation," in capsys.readouterr().out
    assert result["test/num_samples"] == 7
    result = lightbase.train(module(), (X, Y), test=False, **flags)
    assert "test/loss" not in result


def test_loaders_are_used_as_they_are(flags: Any, capsys: Any) -> None:
    loader = DataLoader(TensorDataset(*TENSORS), batch_size=10)
    result = lightbase.train(module(), loader, val=loader, **flags)
    assert "has its own DataLoaders: a resume may end with" in capsys.readouterr().out
    assert result["steps"] == 10
    assert not result.metrics.keys() & {"test/loss"}
    with pytest.raises(UserError, match="so val has to be one, too"):
        lightbase.train(module(), loader, val=(X, Y), **flags)


def test_an_interrupted_run_of_arrays_goes_on(tmp_path: Path, flags: Any) -> None:
    flags |= {"max_epochs": 3, "batch_size": 10}
    whole = lightbase.train(module(), (X, Y), **flags | {"name": "whole"})
    ctrl_c = Terminate()
    ctrl_c.at_batch, ctrl_c.number = 2, signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        lightbase.train(module(), (X, Y), callbacks=[ctrl_c], **flags)
    flags["ckpt_path"] = "last"
    with pytest.raises(UserError, match=r"^batch_size=20: a resume keeps 10"):
        lightbase.train(module(), (X, Y), **flags | {"batch_size": 20})
    result = lightbase.train(module(), (X, Y), **flags)
    both = (weights(tmp_path / name / "version_0") for name in ("whole", "x"))
    assert equal(*both)
    assert result.epochs == whole.epochs


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ({"batch_size": 0}, r"^data.batch_size: '0': Not of type PositiveInt"),
        ({"val_fraction": 0.001}, r"val_fraction=?\S* ?\S* of 100 samples is 0"),
        ({"batchsize": 3}, r"argument batchsize; did you mean batch_size\?"),
    ],
)
def test_mistakes(flag: Any, text: str, flags: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=text):
        lightbase.train(module(), (X, Y), **flags, **flag)
    assert not [*tmp_path.iterdir()]


def test_predictions_for_arrays(tmp_path: Path, flags: Any, monkeypatch: Any) -> None:
    pytest.importorskip("lightbase.commands.predict")
    monkeypatch.setattr("lightbase.config.paths.Project.logs", tmp_path)
    trained = module()
    result = lightbase.train(trained, (X, Y), **flags)
    with torch.no_grad():
        expected = trained(TENSORS[0]).softmax(1)
    fresh = module()
    loaded = lightbase.load("x", fresh)
    for run in (result, trained, loaded):
        for inputs in (X, TENSORS[0], [*TENSORS[0]]):
            torch.testing.assert_close(lightbase.predict(run, inputs), expected)
        torch.testing.assert_close(lightbase.predict(run, X[3]), expected[3])
    assert trained.training
    assert trained.trainer.checkpoint_callbacks  # its Trainer is still the training's
    with pytest.raises(UserError, match=r"float32 \(100, 3\)\n.*float32 \(4,\)"):
        lightbase.predict(result, X[:, :3])
    with pytest.raises(UserError, match=r"no lightbase.train has trained"):
        lightbase.predict(module(), X)
    with pytest.raises(UserError, match="were built in Python"):
        lightbase.predict("x", X)


def test_predictions_of_a_run_of_loaders(flags: Any) -> None:
    pytest.importorskip("lightbase.commands.predict")
    loader = DataLoader(TensorDataset(*TENSORS), batch_size=10)
    result = lightbase.train(module(), loader, val=loader, **flags)
    assert len(lightbase.predict(result, X)) == 100


def test_the_mistakes_of_a_run(flags: Any) -> None:
    pytest.importorskip("lightbase.commands.python")
    pytest.importorskip("lightbase.commands.predict")
    result = lightbase.train(module(), (X, Y), test=(X, Y), **flags)
    outputs = lightbase.predict(result, X)
    wrong = outputs.argmax(1) != torch.tensor(Y)
    found = lightbase.mistakes(result)
    assert sorted(found.tolist()) == wrong.nonzero().flatten().tolist()
    surest = outputs.amax(1)[found]
    assert torch.equal(surest, surest.sort(descending=True).values)
    title = lightbase.confusion_matrix(result).get_suptitle()
    assert title == f"{len(found)} of 100 wrong"
    assert lightbase.pictures(result, "val").keys() == {"confusion_matrix"}


@pytest.mark.parametrize(
    ("convert", "labels"),
    [
        (lambda x: x[::-1], lambda y: y[::-1]),
        (lambda x: x.astype(">f8"), lambda y: y.astype(">i4")),
        (lambda x: x.astype(object), lambda y: y.astype(object)),
        (lambda x: x[:, ::-1][:, ::-1][::-1], lambda y: y.tolist()[::-1]),
    ],
)
def test_arrays_that_torch_does_not_take_are_copied(convert, labels) -> None:
    values = as_tensors((convert(X), labels(Y)))
    for loaded, expected in zip(values, TENSORS, strict=True):
        forth = loaded.float() if loaded.is_floating_point() else loaded
        assert any(
            torch.equal(forth, x.to(forth)) for x in (expected, expected.flip(0))
        )
    with pytest.raises(UserError, match="text labels become numbers"):
        as_tensors((X, np.array(["a", "b"], dtype=object)[Y]))


@pytest.mark.parametrize(
    ("data", "parts", "message"),
    [
        (
            (X, Y),
            {"test": (X[:, :3], Y)},
            r"Linear\(.*\n.*\(3,\) of ArrayData \(test\)",
        ),
        (
            (X, Y),
            {"val": (X[:, :3], Y)},
            r"Linear\(.*\n.*\(3,\) of ArrayData \(val\)",
        ),
    ],
)
def test_samples_that_do_not_fit(data, parts, message, flags, tmp_path) -> None:
    with pytest.raises((UserError, RuntimeError), match=message):
        lightbase.train(module(), data, **parts, **flags)
    assert not [*tmp_path.rglob("version_*")]


def test_scalars_of_numpy_are_numbers(flags: Any) -> None:
    flags |= {"batch_size": np.int64(30), "max_epochs": torch.tensor(1)}
    flags |= {"val_fraction": np.float32(0.5), "class_names": np.array(["a", "b"])}
    arguments: Any = {"optimizer_args": {"momentum": np.float32(0.5)}}
    trained = Classifier(MLP([4, 8, 2]), num_classes=2, lr=np.float32(0.1), **arguments)
    result = lightbase.train(trained, (X, Y), gradient_clip_val=np.float64(1), **flags)
    assert result["steps"] == 1
    config = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert config["data"]["init_args"]["batch_size"] == 30


def test_predictions_for_lists(flags: Any) -> None:
    pytest.importorskip("lightbase.commands.predict")
    result = lightbase.train(module(), (X, Y), **flags)
    expected = lightbase.predict(result, X[:5])
    for inputs in (
        X[:5].tolist(),
        tuple(X[:5]),
        [*X[:5]],
        [x[::-1][::-1] for x in X[:5]],
        X[:5][::-1][::-1],
        X[:5].astype(">f4"),
    ):
        torch.testing.assert_close(lightbase.predict(result, inputs), expected)
    one = lightbase.predict(result, X[0].tolist())
    torch.testing.assert_close(one, expected[0])
    reverse = lightbase.predict(result, [*X[:5][::-1]])
    torch.testing.assert_close(reverse, expected.flip(0))
    for inputs in ([], X[:5, :2].tolist()):
        with pytest.raises(UserError, match=r"samples of the data are torch.float32"):
            lightbase.predict(result, inputs)


@pytest.mark.parametrize("path", ["sub/model.ckpt", "model.ckpt", "data.x/trainer.pt"])
def test_a_path_in_a_message_stays_whole(path: str) -> None:
    with pytest.raises(UserError, match=f"ckpt_path {path}: no such file"):
        lightbase.load(path, module())
