"""How commands read their flags, name errors, and share the handling of signals."""

from pathlib import Path

import pytest

import lightbase
from lightbase.commands.flags import evaluate_flags
from lightbase.commands.script import python_errors
from lightbase.config.errors import LIBRARY, UserError, is_users
from lightbase.run.signals import SIGNALS


def test_flags_for_train_keep_their_order(tmp_path):
    (tmp_path / "x.ckpt").touch()
    names = [f"--data.{letter}=1" for letter in "hgfedcba"]
    options = evaluate_flags(["--ckpt_path", str(tmp_path / "x.ckpt"), *names])
    assert options.others == names


def test_a_call_within_a_training_leaves_its_signal():
    with SIGNALS.handled():
        SIGNALS.waits, SIGNALS.received = True, 15
        with python_errors():
            pass
        assert (SIGNALS.waits, SIGNALS.received) == (True, 15)
    assert not SIGNALS.waits


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/me/lightbase/model/net.py", True),
        ("/home/me/scripts/mine.py", True),
        (LIBRARY / "__init__.py", False),
        (LIBRARY / "run" / "fit.py", False),
        (LIBRARY.parent / "scripts" / "train.py", False),
        (Path(pytest.__file__), False),
        ("<string>", False),
    ],
)
def test_whose_a_file_is(file, expected):
    assert is_users(str(file)) == expected


def test_load_from_checkpoint_takes_the_arguments_of_lightning(trained):
    from example.classifier import Classifier
    from example.regressor import Regressor

    path = trained()[0] / "checkpoints" / "best.ckpt"
    options = {"weights_only": True, "hparams_file": None, "trust": True}
    module = Classifier.load_from_checkpoint(path, **options)
    assert isinstance(module, lightbase.BaseModule)
    with pytest.raises(UserError, match="is of a Classifier"):
        Regressor.load_from_checkpoint(path, trust=True)
    with pytest.raises(UserError, match="weights only"):
        Classifier.load_from_checkpoint(path, weights_only=False)
