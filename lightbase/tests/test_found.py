"""Faults that were found by trying commands which nobody had thought of."""

from paths import fails, script


def test_a_fold_without_folds_is_not_ignored(trained, capsys):
    folder, _ = trained()
    checkpoint = str(folder / "checkpoints" / "best.ckpt")
    typed = ["--ckpt_path", checkpoint, "--trust_checkpoint", "--data.fold=1"]
    assert "data.fold 1" in fails(capsys, 2, lambda: script("evaluate").main(typed))
