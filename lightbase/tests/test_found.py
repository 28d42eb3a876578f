"""Faults that were found by trying commands which nobody had thought of."""

import pytest
from paths import TINY, fails, script


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
