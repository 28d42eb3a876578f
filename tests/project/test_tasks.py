"""Each page of docs/tasks: its files, written as they stand, train to the result that
the page names; evaluate.py gives the same numbers; an interrupted training goes on to
the same weights."""

import gc
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from pages import PACKAGE, REPO, commands, script, write_files
from paths import ACCELERATOR
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

from lightbase import MayMissSteps

PAGES = sorted((REPO / "docs" / "tasks").glob("[!R]*.md"))
QUIET = ["--device_monitor", "false", "--step_timer", "false"]


class Interrupt(MayMissSteps, Callback):
    """Ctrl-C in the second epoch, once."""

    is_done = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and not Interrupt.is_done:
            Interrupt.is_done = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "lightbase.core.folder.Project.logs", tmp_path / "logs"
    )  # of this user
    modules = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - modules:
        if name.startswith(f"{PACKAGE}."):
            del sys.modules[name]
    gc.collect()  # or jsonargparse finds their classes in other tests


def run(command: str, folder: Path, *more: str) -> Any:
    _, path, *args = shlex.split(command, comments=True)
    name = Path(path).stem
    if name in ("train", "sweep", "runs"):
        args += ["--trainer.default_root_dir", str(folder / "logs")]
    return script(name).main([*args, *more])


def weights(run_folder: Path) -> dict[str, Tensor]:
    checkpoint = torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint["state_dict"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_trains_evaluates_and_resumes_as_it_stands(
    page, user_folder, monkeypatch
):
    text = page.read_text()
    write_files(text, user_folder, monkeypatch)
    monkeypatch.syspath_prepend(Path(__file__).parent)  # a config names Interrupt
    trainings: list[
        tuple[str, dict[str, Any], Path]
    ] = []  # command, metrics, folder of the run
    for command in commands(text):
        if command.startswith("pip "):
            continue
        if not command.startswith("python scripts/"):
            subprocess.run(command, shell=True, check=True)
            continue
        result = run(command, user_folder)
        if "scripts/train.py" in command:
            files = (user_folder / "logs").rglob("version_*/metrics.json")
            trainings.append((command, result, max(files, key=os.path.getmtime).parent))
    name, value = re.search(r"reaches `(\w+/\w+)` ([\d.]+)", text).groups()  # type: ignore[union-attr]
    assert trainings[-1][1][name] == pytest.approx(float(value), rel=0.1), (
        "not what the page says"
    )

    for i, (command, metrics, straight) in enumerate(trainings):
        best = straight / "checkpoints" / "best.ckpt"
        again = run(f"python scripts/evaluate.py --ckpt_path {best}", user_folder)
        assert again == {key: metrics[key] for key in again}
        monkeypatch.setattr(Interrupt, "is_done", False)
        interrupt = f"--trainer.callbacks+={__name__}.Interrupt"
        with pytest.raises(SystemExit):
            run(command, user_folder, "--name", f"stopped_{i}", interrupt)
        run(f"python scripts/train.py --name stopped_{i} --ckpt_path last", user_folder)
        one, two = (
            weights(folder)
            for folder in (straight, user_folder / f"logs/stopped_{i}/version_0")
        )
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture
def detection(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, Any]:
    """The Detector, the SmallFCOS and the Rectangles of docs/tasks/detection.md."""
    write_files(
        (REPO / "docs" / "tasks" / "detection.md").read_text(), user_folder, monkeypatch
    )
    detector, small_fcos, rectangles = (
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("detector", "models.small_fcos", "data.rectangles")
    )
    return detector.Detector, small_fcos.SmallFCOS, rectangles.Rectangles


def faster_rcnn() -> nn.Module:
    sizes = {"min_size": 64, "max_size": 96, "num_classes": 3}
    return fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, **sizes
    )


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


def are_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[name], two[name]) for name in one
    )


@pytest.mark.parametrize("name", ["small_fcos", "faster_rcnn"])
def test_a_detector_has_a_loss_in_evaluation_and_learns_no_statistics_there(
    name, detection, monkeypatch
):
    detector, small_fcos, rectangles = detection
    module = detector(small_fcos() if name == "small_fcos" else faster_rcnn()).eval()
    assert any(isinstance(part, _BatchNorm) for part in module.modules())
    losses: dict[str, Tensor] = {}
    monkeypatch.setattr(
        module, "track", lambda stage, loss, *_: losses.update({stage: loss})
    )
    data = rectangles()
    samples = data.load("test")
    batch = data.collate([samples[0], samples[1]])
    before = buffers(module)
    with torch.inference_mode():
        module.validation_step(batch, 0)
        module.test_step(batch, 0)
    assert are_equal(buffers(module), before)
    assert losses.keys() == {"val", "test"}
    assert all(loss.isfinite() and loss > 0 for loss in losses.values())
    assert not any(part.training for part in module.modules())


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning")
def test_validation_and_test_keep_the_statistics_of_a_detectors_training(
    detection, tmp_path
):
    detector, small_fcos, rectangles = detection
    module, data = detector(small_fcos()), rectangles(batch_size=2)
    limits = {"limit_train_batches": 2, "limit_val_batches": 2, "limit_test_batches": 2}
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator=ACCELERATOR,
        max_epochs=1,
        enable_checkpointing=False,
        **limits,
        **quiet,
    )
    untrained = buffers(module)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trained = torch.load(tmp_path / "a.ckpt", "cpu", weights_only=True)["state_dict"]
    counts = [
        value for key, value in trained.items() if key.endswith("num_batches_tracked")
    ]
    assert counts
    assert all(count == 2 for count in counts), "batches of the validation count"
    for evaluate in (trainer.validate, trainer.test):
        evaluate(module, data, verbose=False)
        after = buffers(module)
        assert not are_equal(after, untrained)
        assert are_equal(after, {name: trained[name] for name in after})
