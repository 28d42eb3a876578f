"""Faults that were found by trying commands which nobody had thought of."""

from pathlib import Path

import pytest
from paths import TINY, fails, script

from lightbase.commands.train import main
from lightbase.config.errors import UserError
from lightbase.config.files import write_whole

METRIC = "{class_path: {class_path: torchmetrics.F1Score}}"
# what is typed, and the first line of its error
ERRORS = [
    ([""], "unknown argument ''"),
    (["-trainer.barebones=1"], "did you mean --trainer.barebones?"),
    (["--model.metrics", METRIC], "model.metrics"),
    (["--model.lr=!!timestamp x"], "model.lr: "),
    (
        ["--model.optimizer=Adagrad", "--model.optimizer_args.maximize=1"],
        "model.optimizer Adagrad with {'maximize': 1}",  # of a fused step
    ),
]


@pytest.mark.parametrize(("typed", "expected"), ERRORS)
def test_two_lines_for_what_was_typed(capsys, typed, expected):
    error = fails(capsys, 2, lambda: main(["--config", TINY, *typed]))
    assert expected in error


def test_a_fold_without_folds_is_not_ignored(trained, capsys):
    folder, _ = trained()
    checkpoint = str(folder / "checkpoints" / "best.ckpt")
    typed = ["--ckpt_path", checkpoint, "--trust_checkpoint", "--data.fold=1"]
    assert "data.fold 1" in fails(capsys, 2, lambda: script("evaluate").main(typed))


def test_a_loss_that_does_not_fit_ends_a_search(tmp_path, capsys):
    typed = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path)]
    typed += ["--find=lr", "--model.criterion=torch.nn.CosineEmbeddingLoss"]
    with pytest.raises(SystemExit, match="2"):
        script("tune").main(typed)
    # Lightning's bar is before it in the line
    assert "error: CosineEmbeddingLoss.forward() missing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_in_place_of_a_file_is_said(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"\. cannot be written"):
        write_whole(Path(name), "text")
    assert not any(tmp_path.iterdir())
