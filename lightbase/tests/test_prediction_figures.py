"""The pictures of a run: their tags, what is in them, and that they change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import Callback, LightningModule, Trainer
from paths import Train
from tasks import Outputs, Task, flags_of, outputs_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.tensorboard._utils import figure_to_image
from written import curves, equal, weights

from lightbase.core.predictions import PALETTE
from lightbase.extras import figures
from lightbase.extras.figures import spread

ON = ("--figures_every_n_epochs", 2)
KINDS = ("confusion_matrix", "predictions", "mistakes")
HERE = "test_prediction_figures"
ONE = ("--trainer.max_epochs", 1)


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0})
    accumulator.Reload()
    return accumulator


@pytest.mark.slow
def test_tags_and_steps(train: Train, tmp_path: Path) -> None:
    train(
        *ON,
        "--step_timer",
        "true",
        "--device_monitor",
        "true",
        "--trainer.max_epochs",
        3,
    )
    found = events(tmp_path / "tiny" / "version_0")
    steps = {
        tag: [event.step for event in found.Images(tag)]
        for tag in found.Tags()["images"]
    }
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
    assert groups == ["train", "val", "view", "watch"]
    assert "watch/epoch" in tags


def test_classes_that_are_no_images_have_a_confusion_matrix(train, tmp_path):
    train(*ON, "--data", "small.Points", "--model.net.sizes", "[10,2]")
    tags = events(tmp_path / "tiny" / "version_0").Tags()["images"]
    assert tags == ["view/confusion_matrix/val", "view/confusion_matrix/test"]


@pytest.mark.parametrize(
    "flags",
    [(), ("--trainer.accumulate_grad_batches", 2)],
)
@pytest.mark.slow
def test_watching_changes_no_weight_and_no_metric(train, tmp_path, flags):
    watching = (*ON, "--step_timer", "true", "--device_monitor", "true")
    results = [
        train(*flags, "--name", "plain"),
        train(*flags, *watching, "--name", "watched"),
    ]
    for result in results:
        del result["train_seconds"]
    assert results[0] == results[1]
    folders = [tmp_path / name / "version_0" for name in ("plain", "watched")]
    assert equal(*map(weights, folders))
    plain, watched = map(curves, folders)
    own = "watch/device/"
    assert {
        name: watched[name] for name in watched if not name.startswith(own)
    } == plain


class Drawing:
    """Notes what would be drawn, in the order of drawing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.figures: dict[str, Any] = {}
        self.matrices: list[Any] = []
        self.grids: list[Any] = []
        monkeypatch.setattr(figures, "log_figure", self.log_figure)
        for name, calls in (
            ("confusion_matrix", self.matrices),
            ("image_grid", self.grids),
        ):
            monkeypatch.setattr(
                figures, name, lambda *args, to=calls, **_: to.append(args)
            )

    def log_figure(self, trainer: Trainer, tag: str, figure: Any) -> None:
        self.figures[tag] = figure


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
    assert torch.equal(drawing.matrices[-1][0], counts)
    assert counts.diag().sum() / 75 == pytest.approx(result["test/acc"])

    displayed = figures.displayable(images)
    shown, texts, _ = drawing.grids[-2]
    for k, i in enumerate(spread(75, 25)):
        assert torch.equal(shown[k], displayed[i])
        name = f"{Keep.data.classes[predicted[i]]:.9}"
        assert texts[k].startswith(f"{name} {probabilities[i].max():.0%}")
        assert ("\n" in texts[k]) == (predicted[i] != targets[i]).item()

    shown, texts, title = drawing.grids[-1]
    wrong = [i for i in range(75) if predicted[i] != targets[i]]
    wrong.sort(key=lambda i: probabilities[i, targets[i]].item())
    assert f"the worst of {len(wrong)} mistakes" in title
    assert torch.equal(shown, displayed[wrong[:25]])
    assert all("\nis stripes" in text for text in texts)


@pytest.mark.slow
def test_the_inputs_are_augmented_and_training_draws_what_it_would_have_drawn(
    train, tmp_path
):
    for name, every in (("off", 0), ("on", 1)):
        train(
            "--data",
            "small.Augmented",
            "--figures_every_n_epochs",
            every,
            "--name",
            name,
        )
    train("--name", "plain")
    off, on, plain = (
        weights(tmp_path / name / "version_0") for name in ("off", "on", "plain")
    )
    assert equal(off, on)
    assert not equal(off, plain)


class ByHand(Classifier):
    """Manual optimisation with two optimizers: Lightning's global_step counts both."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        layers = [
            layer for layer in self.net.modules() if isinstance(layer, torch.nn.Linear)
        ]
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
    steps = {
        name: [step for step, _ in points] for name, points in curves(folder).items()
    }
    assert steps["val/loss"] == [18, 37]
    for name in ("train/loss", "watch/device/memory_gib"):
        assert steps[name][-1] == 37
    assert [event.step for event in events(folder).Images("view/mistakes/val")] == [37]


class SameMemory(MLP):
    """Writes all outputs into the same memory, as a network in CUDA graphs."""

    memory = torch.empty(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        type(self).memory = self.memory.to(
            outputs.device
        )  # the same memory from then on
        return outputs if self.training else self.memory[: len(outputs)].copy_(outputs)


def test_predicted_numbers_are_kept_of_each_batch(train, monkeypatch):
    drawing = Drawing(monkeypatch)
    data = (
        "--data",
        "small.Numbers",
        "--data.val_fraction",
        0.3,
        "--model.net.sizes",
        "[10,1]",
    )
    points = []
    for net in ("example.models.mlp.MLP", "test_prediction_figures.SameMemory"):
        model = ("--model", "example.regressor.Regressor", "--model.net", net)
        train(*model, *data, *ON, "--trainer.limit_test_batches", 0)
        points.append(
            drawing.figures["view/predictions/val"].axes[0].lines[0].get_ydata()
        )
    assert len(points[0]) == 90
    assert (points[0] == points[1]).all()


def test_masks_lie_over_the_images(train, monkeypatch):
    drawing = Drawing(monkeypatch)
    train(*ON, flags_of("segmentation"))
    x, y = outputs_of("segmentation")
    tiles, texts, *_ = drawing.grids[-1]
    assert texts == ["image", "true", "predicted"] * 10
    shown = figures.displayable(x[::4])
    assert torch.equal(tiles[0::3], shown)
    assert torch.equal(tiles[1::3], figures.overlay(shown, y[::4]))
    assert torch.equal(tiles[2::3], figures.overlay(shown, x[::4].argmax(1)))


def test_an_overlay_colours_what_counts() -> None:
    shown = figures.overlay(torch.full((1, 3, 4, 4), 0.8), torch.tensor([[[-100, 1]]]))[
        0
    ]
    assert (shown[:, :, :2] == 0.8).all()
    assert torch.allclose(shown[:, 0, 3], (0.8 + PALETTE[1] / 255) / 2)


def test_predicted_numbers_are_drawn_over_true_ones(train, monkeypatch):
    drawing = Drawing(monkeypatch)
    train(*ON, flags_of("regression"))
    points = drawing.figures["view/predictions/test"].axes[0].lines[0]
    x, y = outputs_of("regression")
    assert torch.equal(torch.tensor(points.get_xdata()), y.flatten())
    assert torch.equal(torch.tensor(points.get_ydata()), x.flatten())


class OnlyLoss(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.track("val", torch.zeros(()))


def test_what_is_not_drawn_is_said(train: Train, tmp_path: Path, capsys: Any) -> None:
    train(*ON, "--model", "test_prediction_figures.OnlyLoss", "--monitor", "val/loss")
    tags = events(tmp_path / "tiny" / "version_0").Tags()["images"]
    assert tags == ["view/inputs/train"]
    line = "none of predictions: the outputs and targets that OnlyLoss gives"
    assert capsys.readouterr().out.count(line) == 1
    train(*ON, flags_of("text"), "--model.task", "multiclass", "--name", "misfit")
    assert "that Task gives track do not fit task multiclass" in capsys.readouterr().out
    train(*ON, flags_of("text"), "--name", "none")
    line = "none of predictions: the attribute task of Task is text,"
    assert line in capsys.readouterr().out
    for name in ("misfit", "none"):
        assert not events(tmp_path / name / "version_0").Tags()["images"]


class InDict(Outputs):
    def load(self, split: str) -> Any:  # type: ignore[override]
        inputs, masks = super().load(split)
        return {"image": inputs, "mask": masks}

    def transform_batch(self, batch: Any, training: bool) -> Any:
        return batch["image"], batch["mask"]


class DictOfTargets(InDict):
    def load(self, split: str) -> Any:  # type: ignore[override]
        inputs, masks = Outputs.load(self, split)
        return inputs, {"mask": masks}

    def transform_batch(self, batch: Any, training: bool) -> Any:
        return batch


class MaskOfDict(Task):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0], batch[1]["mask"]), batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step((batch[0], batch[1]["mask"]), batch_idx)


def test_inputs_or_targets_in_a_dict_have_the_pictures_that_can_be_drawn(
    train, tmp_path
):
    flags = flags_of("segmentation", data=f"{HERE}.InDict")
    train(*ON, flags, "--name", "inputs")
    assert not events(tmp_path / "inputs" / "version_0").Tags()["images"]
    flags = flags_of("segmentation", f"{HERE}.MaskOfDict", f"{HERE}.DictOfTargets")
    train(*ON, flags, "--name", "targets")
    tags = events(tmp_path / "targets" / "version_0").Tags()["images"]
    assert {"view/inputs/train", "view/predictions/test"} <= {*tags}


@pytest.mark.slow
def test_a_resumed_run_has_every_picture_once(train: Train, tmp_path: Path) -> None:
    train("--figures_every_n_epochs", 1, "--trainer.max_epochs", 1)
    train(
        "--figures_every_n_epochs", 1, "--ckpt_path", "last", "--trainer.max_epochs", 2
    )
    found = events(tmp_path / "tiny" / "version_0")
    assert [event.step for event in found.Images("view/mistakes/val")] == [18, 37]
    assert [event.step for event in found.Images("view/inputs/train")] == [0]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (2, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_of_any_kind_can_be_shown(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    shown = figures.displayable((torch.rand(2, *shape) * 255).to(dtype))
    assert shown.shape == (2, 3, *shape[1:])
    assert 0 <= shown.min() < shown.max() <= 1


@pytest.mark.parametrize("num", [2, 30, 100])
def test_confusion_matrices_of_many_classes_stay_small(num: int) -> None:
    names = [f"class number {i}" for i in range(num)]
    matrix = figures.confusion_matrix(torch.randint(100, (num, num)), names, "title")
    assert max(figure_to_image(matrix).shape) <= 1500


@pytest.mark.parametrize(
    "flags",
    [
        ("--trainer.logger", "false"),
        ("--trainer.limit_val_batches", 0, *ONE),
        ("--trainer.overfit_batches", 1, "--trainer.log_every_n_steps", 1),
        (
            "--trainer.enable_checkpointing",
            "false",
            "--trainer.log_every_n_steps",
            0,
            *ONE,
        ),
        ("--data.val_fraction", 0, "--trainer.val_check_interval", 5, *ONE),
        ("--trainer.max_epochs", 0),
    ],
)
@pytest.mark.slow
def test_watching_works_with_whatever_is_turned_off(train, flags):
    train(*ON, "--step_timer", "true", "--device_monitor", "true", *flags)
