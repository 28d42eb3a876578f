"""Checkpoints of older versions, built here from one of today: they evaluate and resume as they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import script
from test_training import Terminate, curves, equal, weights

from project.engine.older import as_today

Train = Callable[..., dict[str, Any]]
SIGTERM = ("--trainer.callbacks", "test_training.Terminate")


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def make_old(checkpoint: dict[str, Any], num_at_once: int = 1) -> None:
    """Change a checkpoint to what the first version, with the Classifier that held loss and sums itself, has written.

    num_at_once: --steps_per_execution, whose steps were made by manual optimisation and counted as one batch.
    """
    del checkpoint["callbacks"]["Curves"], checkpoint["package"]
    checkpoint |= {"steps_per_execution": num_at_once, "last_log_step": 0}
    checkpoint["train_sums"] = {"loss": 0.0, "correct": 0.0, "samples": 0.0}
    config = checkpoint["config"]
    for name in ("monitor_mode", "try_network"):
        del config[name]
    config |= {"cuda_graph": False, "steps_per_execution": num_at_once}
    arguments = config["model"]["init_args"]
    for name in ("criterion", "metrics", "num_classes", "compile_mode"):
        del arguments[name]
    arguments["label_smoothing"] = 0.0
    if num_at_once == 1:
        return
    loop = checkpoint["loops"]["fit_loop"]
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    loop["epoch_loop.manual_optimization.optim_step_progress"] = steps
    none = {"completed": 0, "ready": 0}
    loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"] = {"total": none, "current": none}
    for counts in (loop["epoch_loop.batch_progress"][part] for part in ("total", "current")):
        counts.update({name: -(-num // num_at_once) for name, num in counts.items()})
    for loader in loop["state_dict"]["combined_loader"]:
        loader["num_batches"] = -(-loader["num_batches"] // num_at_once)


def make_file_old(path: Path, num_at_once: int = 1) -> None:
    checkpoint = read(path)
    make_old(checkpoint, num_at_once)
    torch.save(checkpoint, path)


def test_an_older_checkpoint_evaluates(train: Train, tmp_path: Path) -> None:
    result = train()
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    make_file_old(path)
    found = script("evaluate").main(["--ckpt_path", str(path)])
    assert found == {name: value for name, value in result.items() if name.startswith("test/")}


@pytest.mark.parametrize("num_at_once", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "at_batch", [pytest.param(None, marks=pytest.mark.slow), 11], ids=["after an epoch", "in an epoch"]
)
@pytest.mark.linux
def test_an_older_run_goes_on_to_the_same_weights(
    train: Train,
    trained: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
    num_at_once: int,
    at_batch: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = (
        "--model.scheduler",
        "StepLR",
        "--model.scheduler_args.step_size",
        10,
        "--model.scheduler_interval",
        "step",
    )
    flags += ("--trainer.max_epochs", 3)
    whole, _ = trained(*flags)
    if at_batch is None:
        train(*flags, "--trainer.max_epochs", 2)
    else:
        monkeypatch.setattr(Terminate, "at_batch", at_batch)
        with pytest.raises(SystemExit):
            train(*flags, *SIGTERM)
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "last.ckpt"
    steps = read(path)["global_step"]
    assert steps == (38 if at_batch is None else 19 + 12)
    make_file_old(path, num_at_once)
    result = train(*flags, "--steps_per_execution", num_at_once, "--ckpt_path", "last")
    assert result["steps"] == 57
    folders = tmp_path / "tiny" / "version_0", whole
    assert equal(*map(weights, folders))
    found, expected = (curves(folder) for folder in folders)
    for name in ("lr", "train/loss", "train/acc", "val/loss", "val/acc"):
        assert found[name][-2:] == expected[name][-2:]


def test_label_smoothing_is_the_criterion_now() -> None:
    config: dict[str, Any] = {"model": {"init_args": {"label_smoothing": 0.1, "lr": 0.5}}}
    as_today({"config": config})
    criterion = {"class_path": "torch.nn.CrossEntropyLoss", "init_args": {"label_smoothing": 0.1}}
    assert config["model"]["init_args"] == {"lr": 0.5, "criterion": criterion}


def test_another_name_of_the_package_is_todays(train: Train, tmp_path: Path) -> None:
    result = train()
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    checkpoint = read(path)
    checkpoint["package"] = "shoes"
    config = checkpoint["config"]
    config["model"]["class_path"] = "shoes.classifier.Classifier"
    config["model"]["init_args"]["net"]["class_path"] = "shoes.models.mlp.MLP"
    config["data"]["class_path"] = "shoes.data.synthetic.SyntheticImages"
    torch.save(checkpoint, path)
    found = script("evaluate").main(["--ckpt_path", str(path)])
    assert found == {name: value for name, value in result.items() if name.startswith("test/")}


def test_only_import_paths_of_the_package_are_renamed() -> None:
    callbacks = [{"class_path": "shoes.callbacks.Own"}, {"class_path": "shoestring.Own"}, {"class_path": "torch.nn.X"}]
    args = {"text": "shoes.x", "optimizer": "SGD", "test_views": "shoes.data.transforms.mirrored"}
    config = {"model": {"init_args": args}, "trainer": {"callbacks": callbacks}}
    as_today({"config": config, "package": "shoes"})
    own, *others = callbacks
    assert own["class_path"].endswith(".callbacks.Own")
    assert not own["class_path"].startswith("shoes.")
    assert [other["class_path"] for other in others] == ["shoestring.Own", "torch.nn.X"]
    assert args == {"text": "shoes.x", "optimizer": "SGD", "test_views": "project.data.transforms.mirrored"}
