"""The pictures of a run: their tags, what is in them, and that they change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.regressor import Regressor
from lightning import Callback, LightningModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import curves, equal, weights
from torch import Tensor
from torch.utils.tensorboard._utils import figure_to_image

from lightbase.watch import figures
from lightbase.watch.figures import spread

Train = Callable[..., dict[str, Any]]
ON = ("--figures_every_n_epochs", 2)
KINDS = ("confusion_matrix", "predictions", "mistakes")
ONE = ("--trainer.max_epochs", 1)


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0})
    accumulator.Reload()
    return accumulator


@pytest.mark.slow
def test_tags_and_steps(train: Train, tmp_path: Path) -> None:
    train(*ON, "--step_timer", "true", "--device_monitor", "true", "--trainer.max_epochs", 3)
    found = events(tmp_path / "tiny" / "version_0")
    steps = {tag: [event.step for event in found.Images(tag)] for tag in found.Tags()["images"]}
    of_epochs_2_and_3 = [2 * 19 - 1, 3 * 19 - 1]
    assert steps == {
        "view/inputs/train": [0],
        **{f"view/{kind}/val": of_epochs_2_and_3 for kind in KINDS},
        **{f"view/{kind}/test": [3 * 19 - 1] for kind in KINDS},
        "watch/step_time/pie": [3 * 19 - 1],
    }
    # TensorBoard shows groups by name: loss and metrics come before what watches
    tags = found.Tags()["scalars"] + found.Tags()["images"]
    groups = sorted({tag.partition("/")[0] for tag in tags})
    assert groups == ["lr", "test", "train", "val", "view", "watch"]
    assert "watch/epoch" in tags


def test_classes_that_are_no_images_have_a_confusion_matrix(train, tmp_path):
    train(*ON, "--data", "small.Points", "--model.net.sizes", "[10,2]")
    tags = events(tmp_path / "tiny" / "version_0").Tags()["images"]
    assert tags == ["view/confusion_matrix/val", "view/confusion_matrix/test"]


@pytest.mark.parametrize(
    "flags", [(), ("--steps_per_execution", 8), ("--trainer.accumulate_grad_batches", 2)]
)
@pytest.mark.slow
def test_watching_changes_no_weight_and_no_metric(train, tmp_path, flags):
    watching = (*ON, "--step_timer", "true", "--device_monitor", "true")
    results = [train(*flags, "--name", "plain"), train(*flags, *watching, "--name", "watched")]
    for result in results:
        del result["train_seconds"]
    assert results[0] == results[1]
    folders = [tmp_path / name / "version_0" for name in ("plain", "watched")]
    assert equal(*map(weights, folders))
    plain, watched = map(curves, folders)
    own = ("watch/device/", "watch/step_time/")
    assert {name: watched[name] for name in watched if not name.startswith(own)} == plain


class Drawing:
    """Notes what would be drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.matrices: dict[str, Tensor] = {}
        self.grids: list[tuple[str, list[Tensor], list[str], list[str]]] = []
        monkeypatch.setattr(figures, "log_figure", lambda *_: None)
        monkeypatch.setattr(figures, "confusion_matrix", self.matrix)
        monkeypatch.setattr(figures, "image_grid", self.grid)

    def matrix(self, counts: Tensor, classes: list[str], title: str) -> None:
        self.matrices[title.split(":")[0]] = counts

    def grid(self, images: list[Tensor], texts: list[str], colours: list[str], title: str) -> None:
        self.grids.append((title, images, texts, colours))


class Keep(Callback):
    """The module and the data of the last run."""

    model: Any
    data: Any

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Keep.model, Keep.data = pl_module, trainer.datamodule  # type: ignore[attr-defined]


def test_the_pictures_show_what_the_network_says(train, monkeypatch):
    drawing = Drawing(monkeypatch)
    result = train(*ON, "--trainer.callbacks", "test_prediction_figures.Keep")
    images, targets = Keep.data.splits["test"].inputs, Keep.data.splits["test"].targets
    with torch.no_grad():
        probabilities = Keep.model.net(Keep.data.normalize(images)).softmax(1)
    predicted = probabilities.argmax(1)
    counts = torch.zeros(4, 4, dtype=torch.long)
    for i, j in zip(targets, predicted, strict=True):
        counts[i, j] += 1
    assert torch.equal(drawing.matrices["test"], counts)
    assert counts.diag().sum() / 75 == pytest.approx(result["test/acc"])
    assert counts.sum() == 75

    _, shown, texts, colours = drawing.grids[-2]
    for k, i in enumerate(spread(75, 25)):
        assert torch.equal(shown[k], images[i])
        assert texts[k].startswith(
            f"{figures.shorten(Keep.data.classes[predicted[i]], 9)} {probabilities[i].max():.0%}"
        )
        assert (colours[k] == figures.RIGHT) == (predicted[i] == targets[i]).item()

    title, shown, texts, _ = drawing.grids[-1]
    wrong = [i for i in range(75) if predicted[i] != targets[i]]
    wrong.sort(key=lambda i: probabilities[i, targets[i]].item())
    assert f"the worst of {len(wrong)} mistakes" in title
    assert len(shown) == min(25, len(wrong)) > 3
    for image, i in zip(shown, wrong, strict=False):
        assert torch.equal(image, images[i])
    assert all("\nis stripes" in text for text in texts)


@pytest.mark.slow
def test_the_inputs_are_augmented_and_training_draws_what_it_would_have_drawn(train, tmp_path):
    for name, every in (("off", 0), ("on", 1)):
        train("--data", "small.Augmented", "--figures_every_n_epochs", every, "--name", name)
    train("--name", "plain")
    off, on, plain = (weights(tmp_path / name / "version_0") for name in ("off", "on", "plain"))
    assert equal(off, on)
    assert not equal(off, plain)


class ByHand(Classifier):
    """Manual optimisation with two optimizers: Lightning's global_step counts both."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        layers = [layer for layer in self.net.modules() if isinstance(layer, torch.nn.Linear)]
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        second.step()


def test_with_two_optimizers_all_curves_and_pictures_count_batches(train, tmp_path):
    watching = ("--step_timer", "true", "--device_monitor", "true")
    result = train(*ON, *watching, "--model", "test_prediction_figures.ByHand")
    assert result["steps"] == 2 * 19
    folder = tmp_path / "tiny" / "version_0"
    steps = {name: [step for step, _ in points] for name, points in curves(folder).items()}
    assert steps["val/loss"] == [18, 37]
    for name in ("train/loss", "watch/device/memory_gib", "watch/step_time/step_ms"):
        assert steps[name][-1] == 37
    assert [event.step for event in events(folder).Images("view/mistakes/val")] == [37]


class SameMemory(Regressor):
    """Writes all outputs into the same memory, as a network in CUDA graphs."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = super().validation_step(batch, batch_idx)
        if batch_idx == 0:
            self.memory = torch.empty_like(outputs)
        return self.memory[: len(outputs)].copy_(outputs)


def test_predicted_numbers_are_kept_of_each_batch(train, monkeypatch):
    drawn: list[Tensor] = []
    monkeypatch.setattr(figures, "log_figure", lambda *_: None)
    monkeypatch.setattr(
        figures, "true_against_predicted", lambda _, predicted, __: drawn.append(predicted)
    )
    data = ("--data", "small.Numbers", "--model.net.sizes", "[10,1]", "--data.val_fraction", 0.3)
    for name in ("example.regressor.Regressor", "test_prediction_figures.SameMemory"):
        train("--model", name, *data, *ON, "--trainer.limit_test_batches", 0)
    assert len(drawn[0]) == 90
    assert torch.equal(*drawn)


class NoLogits(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().validation_step(batch, batch_idx)


def test_without_logits_nothing_is_drawn(train: Train, tmp_path: Path) -> None:
    train(*ON, "--model", "test_prediction_figures.NoLogits")
    tags = events(tmp_path / "tiny" / "version_0").Tags()["images"]
    assert "view/confusion_matrix/val" not in tags
    assert "view/confusion_matrix/test" in tags


@pytest.mark.slow
def test_a_resumed_run_has_every_picture_once(train: Train, tmp_path: Path) -> None:
    train("--figures_every_n_epochs", 1, "--trainer.max_epochs", 1)
    train("--figures_every_n_epochs", 1, "--ckpt_path", "last", "--trainer.max_epochs", 2)
    found = events(tmp_path / "tiny" / "version_0")
    assert [event.step for event in found.Images("view/mistakes/val")] == [18, 37]
    assert [event.step for event in found.Images("view/inputs/train")] == [0]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (2, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_of_any_kind_can_be_shown(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    image = (torch.rand(shape) * 255).to(dtype)
    shown = figures.displayable(image)
    assert shown.shape == ((8, 8, 3) if shape[0] == 3 else shape[1:])
    assert shown.min() >= 0
    assert shown.max() <= 1


@pytest.mark.parametrize("num", [2, 30, 100])
def test_confusion_matrices_of_many_classes_stay_small(num: int) -> None:
    names = [f"class number {i}" for i in range(num)]
    matrix = figures.confusion_matrix(torch.randint(100, (num, num)), names, "title")
    assert max(figure_to_image(matrix).shape) <= 1300


@pytest.mark.parametrize(
    "flags",
    [
        ("--trainer.logger", "false"),
        ("--trainer.limit_val_batches", 0, *ONE),
        ("--trainer.overfit_batches", 1, "--trainer.log_every_n_steps", 1),
        ("--trainer.enable_checkpointing", "false", "--trainer.log_every_n_steps", 0, *ONE),
        ("--data.val_fraction", 0, "--trainer.val_check_interval", 5, *ONE),
        ("--trainer.max_epochs", 0),
    ],
)
@pytest.mark.slow
def test_watching_works_with_whatever_is_turned_off(train, flags):
    train(*ON, "--step_timer", "true", "--device_monitor", "true", *flags)
