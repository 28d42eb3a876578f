"""Data without a class: arrays, Datasets and DataLoaders in lightbase.train, and
predictions for arrays."""

import numpy as np
import pytest
import torch
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import seed_everything
from torch.utils.data import DataLoader, TensorDataset
from written import equal, weights

import lightbase
from lightbase.config.errors import UserError

X = np.random.default_rng(0).normal(size=(100, 4))
Y = (X.sum(1) > 0).astype(int)
TENSORS = torch.tensor(X, dtype=torch.float32), torch.tensor(Y)


@pytest.fixture
def flags(tmp_path):
    quiet = {"device_monitor": False, "step_timer": False, "figures_every_n_epochs": 0}
    return {"default_root_dir": str(tmp_path), "max_epochs": 1, "name": "x", **quiet}


def module():
    seed_everything(1, verbose=False)
    return Classifier(MLP([4, 8, 2]), num_classes=2, lr=0.1)


class Table:
    """What pandas has: NumPy reads it."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_samples_of_each_kind_train_to_the_same_weights(tmp_path, flags, capsys):
    kinds = ((X, Y), TENSORS, (Table(X), Table(Y)), TensorDataset(*TENSORS))
    kinds += ((X.astype(">f8"), Y.astype(">i4")), (X[::-1][::-1], Y.tolist()))
    for number, data in enumerate(kinds):
        result = lightbase.train(module(), data, batch_size=30, **flags)
        out = capsys.readouterr().out
        assert "90 training, 10 validation samples" in out
        assert "No test: " in out
        assert result["steps"] == 3
        best = weights(tmp_path / "x" / f"version_{number}", "best")
        assert equal(result.module.state_dict(), best)
        assert equal(best, weights(tmp_path / "x" / "version_0", "best"))


def test_parts_are_used_as_they_are_given(flags, capsys):
    result = lightbase.train(
        module(), (X, Y), val=(X[:20], Y[:20]), test=(X[:7], Y[:7]), **flags
    )
    assert "100 training, 20 validation," in capsys.readouterr().out
    assert result["test/num_samples"] == 7
    result = lightbase.train(module(), (X, Y), test=False, **flags)
    assert "test/loss" not in result


def test_loaders_are_used_as_they_are(flags, capsys):
    loader = DataLoader(TensorDataset(*TENSORS), batch_size=10)
    result = lightbase.train(module(), loader, val=loader, **flags)
    assert "has its own DataLoaders: a resume may end with" in capsys.readouterr().out
    assert result["steps"] == 10
    assert "test/loss" not in result.metrics
    assert len(lightbase.predict(result, X)) == 100
    with pytest.raises(UserError, match="so val has to be one, too"):
        lightbase.train(module(), loader, val=(X, Y), **flags)


def test_predictions_for_arrays(tmp_path, flags, monkeypatch):
    pytest.importorskip("lightbase.commands.predict")
    monkeypatch.setattr("lightbase.config.paths.Project.logs", tmp_path)
    trained = module()
    result = lightbase.train(trained, (X, Y), **flags)
    with torch.no_grad():
        expected = trained(TENSORS[0]).softmax(1)
    fresh = module()
    loaded = lightbase.load("x", fresh)
    for run in (result, trained, loaded):
        for inputs in (X, TENSORS[0], [*TENSORS[0]], X.tolist(), X.astype(">f4")):
            torch.testing.assert_close(lightbase.predict(run, inputs), expected)
        torch.testing.assert_close(lightbase.predict(run, X[3]), expected[3])
    assert trained.training
    assert trained.trainer.checkpoint_callbacks  # its Trainer is still the training's
    with pytest.raises(UserError, match=r"float32 \(100, 3\)\n.*float32 \(4,\)"):
        lightbase.predict(result, X[:, :3])
    with pytest.raises(UserError, match="samples of the data are"):
        lightbase.predict(result, [])
    with pytest.raises(UserError, match=r"no lightbase.train has trained"):
        lightbase.predict(module(), X)
    with pytest.raises(UserError, match="were built in Python"):
        lightbase.predict("x", X)


def test_the_mistakes_of_a_run(flags):
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


def test_a_module_that_has_been_trained_says_so_or_begins_anew(flags, capsys):
    """In a loop over folds, it has seen the test samples of the later ones."""
    line = "has been trained already, in "
    first = module()
    run = lightbase.train(first, TENSORS, **flags).folder
    expected = weights(run)
    assert line not in capsys.readouterr().out
    lightbase.train(first, TENSORS, ckpt_path="last", **{**flags, "max_epochs": 2})
    assert line not in capsys.readouterr().out
    lightbase.train(first, TENSORS, **flags)
    assert f"Classifier {line}{run}: its weights go on" in capsys.readouterr().out
    again = lightbase.train(first, TENSORS, reset=True, **flags)
    assert line not in capsys.readouterr().out
    assert equal(weights(again.folder), expected)


@pytest.mark.parametrize("part", [0, 1])
def test_masked_values_are_refused(flags, part):
    arrays = [X.copy(), Y.copy()]
    arrays[part] = np.ma.masked_equal(arrays[part], arrays[part].flat[0])
    with pytest.raises(UserError, match=r"[1-9]\d* values are masked\n.*filled"):
        lightbase.train(module(), tuple(arrays), **flags)
    arrays[part] = np.ma.array(arrays[part].data)  # nothing is masked
    lightbase.train(module(), tuple(arrays), **flags)
