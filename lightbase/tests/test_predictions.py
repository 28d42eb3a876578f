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

ONE_EPOCH = "--trainer.max_epochs 1"
SEES = "--model test_predictions.Sees --trainer.precision"


class Sees(Classifier):
    """Keeps what its tests see."""

    seen: list[Tensor] = []

    def test_step(self, batch, batch_idx: int):
        logits = super().test_step(batch, batch_idx)
        self.seen.append(logits.softmax(1).cpu())
        return logits


def rows(*args: object):
    """The arrays that predict.py writes."""
    words = argv(*args)
    script("predict").main(words)
    return np.load(words[words.index("--output") + 1])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_predictions_are_what_the_test_has_measured(trained, tmp_path, precision):
    folder, metrics = trained(SEES, precision, ONE_EPOCH)
    Sees.seen.clear()
    words = ["--ckpt_path", checkpoint_file(folder)]
    measured = script("evaluate").main(argv(*words))
    predicted = rows(*words, "--output", tmp_path / "rows.npz")["prediction"]
    assert measured["test/acc"] == metrics["test/acc"]
    assert (torch.from_numpy(predicted) == torch.cat(Sees.seen)).all()
    script("predict").main(argv(*words, "--output", tmp_path / "rows.csv"))
    lines = [line.split(",") for line in (tmp_path / "rows.csv").read_text().split()]
    right = [line[1] == line[-1] for line in lines[1:]]
    assert np.float32(sum(right) / 75) == np.float32(measured["test/acc"])


def test_predictions_take_the_flags_of_the_test(trained, tmp_path):
    folder, _ = trained(SEES, "bf16-mixed", ONE_EPOCH)
    flags = "--trainer.precision 64-true --data.num_test 40"
    words = ["--ckpt_path", checkpoint_file(folder), flags]
    Sees.seen.clear()
    script("evaluate").main(argv(*words))
    output = rows(*words, "--data.batch_size=7", "--output", tmp_path / "rows.npz")
    assert output["prediction"].shape == (40, 4)
    assert output["prediction"].dtype == np.float64
    predicted = torch.from_numpy(output["prediction"])
    torch.testing.assert_close(predicted, torch.cat(Sees.seen))


def test_files_stand_among_flags_of_the_trainer(trained, tmp_path):
    folder, _ = trained(SEES, "bf16-mixed", ONE_EPOCH)
    images, _ = SyntheticImages((3, 8, 8), 4, num_test=75, noise=0.05).load("test")
    files = [tmp_path / f"{name}.png" for name in "abc"]
    for file, image in zip(files, images, strict=False):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    output = ("--output", tmp_path / "rows.npz")
    words = ["--ckpt_path", checkpoint_file(folder), *output]
    of_files = rows(
        *words, files[0], f"--trainer.accelerator {ACCELERATOR}", *files[1:]
    )
    assert of_files["names"].tolist() == [*map(str, files)]
    assert (of_files["prediction"] == rows(*words)["prediction"][:3]).all()


def test_predictions_of_files_need_no_data_set(trained, tmp_path, monkeypatch):
    folder, _ = trained(ONE_EPOCH)
    for name in ("load", "prepare_data"):
        monkeypatch.setattr(
            SyntheticImages, name, lambda *_: pytest.fail("the data is read")
        )
    image = tmp_path / "black.png"
    Image.new("RGB", (5, 5)).save(image)
    words = ["--ckpt_path", checkpoint_file(folder), image]
    output = rows(*words, "--output", tmp_path / "rows.npz")
    assert output["names"].tolist() == [str(image)]
