"""The test set of data that has none is part of the training samples. No tool may test
a checkpoint on samples of its training. And nothing may be selected by a test."""

import re
from pathlib import Path

import pytest
import torch
from attached import attach
from paths import ACCELERATOR, argv, fails, script
from written import checkpoint, checkpoint_file, curves, equal, weights

from lightbase.config.files import read_json
from lightbase.data.module import BaseDataModule

ME = "test_test_set"
ONE_EPOCH = "--trainer.max_epochs 1"


class OneFile(BaseDataModule):
    """Data without a test set, whose inputs tell which sample they are."""

    classes = ["even", "odd"]

    def load(self, split):
        part = self.seeded_part(100, split)
        inputs = torch.zeros(100, 10)
        inputs[:, 0] = torch.arange(100.0)
        return inputs[part], torch.arange(100)[part] % 2


ONE_FILE = (
    "--model.net torch.nn.Linear --model.net.in_features 10 --model.net.out_features 2 "
    f"--data {ME}.OneFile --data.batch_size 20"
)


OUTPUTS = {"predict": "output.csv", "export": "output.pth"}


def samples(data, split: str) -> set[float]:
    return set(data.splits[split].values[0][:, 0].tolist())


def error_of(capsys, tool: str, *args: object) -> str:
    return fails(capsys, 2, lambda: script(tool).main(argv("--ckpt_path", *args)))


def test_each_split_seed_has_the_same_test_samples():
    data = attach(OneFile(split_seed=1))
    data.setup("test")
    parts = [samples(data, split) for split in ("test", "train", "val")]
    assert parts[0] == samples(attach(OneFile(), "test"), "test")
    assert [len(part) for part in parts] == [20, 72, 8]
    assert set.union(*parts) == set(range(100))


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        ("evaluate", "--data.init_args.split_seed 2"),
        ("evaluate", "--data.val_fraction 0.3"),
        ("evaluate", "--config"),
        ("predict", "--data.num_folds 5 --data.fold 0"),
        ("export", "--data.val_fraction 0.3"),
    ],
)
def test_a_checkpoint_keeps_its_split(trained, tmp_path, capsys, tool, flags):
    folder, _ = trained(ONE_FILE, ONE_EPOCH)
    words = [flags]
    if flags == "--config":
        words.append(as_yaml(tmp_path / "other.yaml", split_seed=2))
    if tool != "evaluate":
        words += ["--output", tmp_path / OUTPUTS[tool]]
    error = error_of(capsys, tool, checkpoint_file(folder), *words)
    assert "--data." in error
    assert "test may not have samples of the training" in error
    assert not [*tmp_path.glob("output.*")]


def as_yaml(file: Path, **data) -> Path:
    """An experiment on OneFile, as a user writes it."""
    net = "{class_path: torch.nn.Linear, init_args: {in_features: 10, out_features: 2}}"
    file.write_text(
        f"model: {{net: {net}}}\n"
        f"data: {{class_path: {ME}.OneFile, init_args: {data}}}\n"
        f"trainer: {{accelerator: {ACCELERATOR}}}\n"
    )
    return file


def test_a_config_without_the_folds_of_the_training_is_refused(
    trained, tmp_path, capsys
):
    """They may have been flags. The fold is the only test set that this data has."""
    folder, _ = trained(ONE_FILE, ONE_EPOCH, "--data.num_folds 5 --data.fold 1")
    flags = ["--config", as_yaml(tmp_path / "same.yaml")]
    error = error_of(capsys, "evaluate", checkpoint_file(folder), *flags)
    assert "unknown argument" not in error


def test_a_run_of_version_0_3_keeps_its_test_set_with_a_config(trained, tmp_path):
    """There it followed from split_seed."""
    folder, _ = trained(ONE_FILE, ONE_EPOCH, "--data.split_seed 2")
    content = torch.load(checkpoint_file(folder), weights_only=True)
    content["OneFile"].pop("test_seed", None)
    older = tmp_path / "older.ckpt"
    torch.save(content, older)
    words = argv("--ckpt_path", older, "--trust_checkpoint")
    expected = script("evaluate").main(words)
    config = as_yaml(tmp_path / "same.yaml", split_seed=2)
    assert script("evaluate").main([*words, "--config", str(config)]) == expected


def test_after_a_fold_the_test_set_of_the_data_can_be_tested(trained):
    folder, metrics = trained("--data.num_folds 5 --data.fold 1", ONE_EPOCH)
    assert metrics["test/num_samples"] == 70
    words = argv("--ckpt_path", checkpoint_file(folder), "--data.num_folds null")
    assert script("evaluate").main(words)["test/num_samples"] == 75


def test_nothing_is_selected_on_test_data(train, tmp_path, capsys):
    """What is measured on it in each epoch has its own name."""
    flags = "--data.val_fraction 0 --model.per_class true --trainer.max_epochs 3"
    metrics = train(flags, "--model.lr 0.5")
    folder = tmp_path / "tiny/version_0"
    assert equal(weights(folder, "best"), weights(folder, "last"))
    assert checkpoint(folder, "best")["epoch"] == 2
    output = capsys.readouterr().out
    assert "best.ckpt is the last epoch (data.val_fraction 0: each epoch" in output
    points = curves(folder)
    assert "test_each_epoch_class_acc/stripes_3" in points
    assert not [name for name in points if name.startswith(("val", "view/test_each"))]
    values = points["test_each_epoch/loss"]
    assert values[-1][1] == pytest.approx(metrics["test/loss"])
    assert "best" not in read_json(folder / "progress.json")


def test_the_test_can_be_left_to_evaluate(train, capsys):
    """It gives the same numbers later, and a resume may ask for them."""
    expected = train(ONE_EPOCH, "--name with")
    metrics = train(ONE_EPOCH, "--name without --test false")
    assert metrics.keys() == {"epochs", "steps", "train_seconds"}
    found = re.search(
        "No test .--test false.; to test it: (.*)", capsys.readouterr().out
    )
    assert found
    _, _, *words = found[1].split()
    assert script("evaluate").main(words).items() <= expected.items()
    for test in ("", "--test true"):  # a resume keeps the setting
        metrics = train(f"--name without --ckpt_path last {test}")
        assert ("test/acc" in metrics) == bool(test)
    assert metrics["test/loss"] == expected["test/loss"]
