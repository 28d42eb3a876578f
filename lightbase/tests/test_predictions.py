"""predict.py gives what the test has measured, in the precision of the run."""

import numpy as np
import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from paths import ACCELERATOR, argv, script
from PIL import Image
from torch import Tensor
from written import checkpoint_file

SEES = "--trainer.max_epochs 1 --model test_predictions.Sees --trainer.precision"
evaluate = script("evaluate").main


class Sees(Classifier):
    """Keeps what its tests see."""

    seen: list[Tensor] = []

    def test_step(self, batch, batch_idx: int):
        logits = super().test_step(batch, batch_idx)
        self.seen.append(logits.softmax(1).cpu())
        return logits


@pytest.fixture
def rows(tmp_path):
    """Return a function that returns the arrays that predict.py writes."""

    def run(*args: object):
        script("predict").main(argv(*args, "--output", tmp_path / "rows.npz"))
        with np.load(tmp_path / "rows.npz") as arrays:
            return dict(arrays)

    return run


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_predictions_are_what_the_test_has_measured(trained, rows, precision):
    folder, metrics = trained(SEES, precision)
    words = ["--ckpt_path", checkpoint_file(folder)]
    Sees.seen.clear()
    measured = evaluate(argv(*words))
    assert measured["test/acc"] == metrics["test/acc"]
    predicted = torch.from_numpy(rows(*words)["prediction"])
    assert (predicted == torch.cat(Sees.seen)).all()


def test_predictions_take_the_flags_of_the_test(trained, rows):
    folder, _ = trained(SEES, "bf16-mixed")
    flags = "--trainer.precision 64-true --data.num_test 40"
    words = ["--ckpt_path", checkpoint_file(folder), flags]
    Sees.seen.clear()
    evaluate(argv(*words))
    predicted = torch.from_numpy(rows(*words, "--data.batch_size=7")["prediction"])
    assert predicted.shape == (40, 4)
    torch.testing.assert_close(predicted, torch.cat(Sees.seen))


def test_files_stand_among_flags_and_need_no_data_set(
    trained, rows, tmp_path, monkeypatch
):
    folder, _ = trained(SEES, "bf16-mixed")
    words = ["--ckpt_path", checkpoint_file(folder)]
    expected = rows(*words)["prediction"][:3]
    images, _ = SyntheticImages((3, 8, 8), 4, num_test=75, noise=0.05).load("test")
    files = [tmp_path / f"{name}.png" for name in "abc"]
    for file, image in zip(files, images, strict=False):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    monkeypatch.delattr(SyntheticImages, "load")
    accelerator = f"--trainer.accelerator {ACCELERATOR}"
    output = rows(*words, files[0], accelerator, *files[1:])
    assert output["names"].tolist() == [*map(str, files)]
    assert (output["prediction"] == expected).all()
