"""The pictures of a run: their tags, what is in them, and that they change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import flags_of, outputs_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from written import curves, equal, weights

from lightbase.model.predictions import PALETTE
from lightbase.watch import figures

ON = "--figures_every_n_epochs 2"


def picture_steps(folder: Path) -> dict[str, list[int]]:
    """Return {tag: steps} of the pictures in a run's event files."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    tags = events.Tags()["images"]
    return {tag: [event.step for event in events.Images(tag)] for tag in tags}


def test_each_picture_is_there_once_also_after_a_resume(train, tmp_path):
    train(ON, "--trainer.max_epochs 3")
    train(ON, "--ckpt_path last --trainer.max_epochs 4")
    folder = tmp_path / "tiny" / "version_0"
    kinds = ("confusion_matrix", "predictions")
    assert picture_steps(folder) == {
        "view/inputs/train": [0],
        # of epochs 2, 3 and 4: the third one was the last one
        **{f"view/{kind}/val": [37, 56, 75] for kind in kinds},
        **{f"view/{kind}/test": [76] for kind in kinds},
    }
    # TensorBoard shows groups by name: loss and metrics come before what watches
    assert curves(folder)["test/loss"][0][0] == 76


@pytest.mark.slow
def test_watching_changes_no_weight_and_no_metric(train, tmp_path):
    found = []
    watched = f"{ON} --step_timer true --device_monitor true"
    for name, flags in (("plain", "--step_timer false"), ("watched", watched)):
        result = train(flags, "--data small.Augmented --name", name)
        folder = tmp_path / name / "version_0"
        points = curves(folder)
        points = {x: points[x] for x in points if "device" not in x}
        found.append((result | {"train_seconds": 0}, points))
        found.append(weights(folder))
    assert found[0] == found[2]
    assert equal(found[1], found[3])


class Drawing:
    """Notes what would be drawn, in the order of drawing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.figures: dict[str, Any] = {}
        self.matrices: list[Any] = []
        self.grids: list[Any] = []
        monkeypatch.setattr(figures, "log_figure", self.log_figure)
        add = monkeypatch.setattr
        add(figures, "confusion_matrix", lambda *args: self.matrices.append(args))
        add(figures, "image_grid", lambda *args: self.grids.append(args))

    def log_figure(self, trainer: Any, tag: str, figure: Any) -> None:
        self.figures[tag] = figure
        self.trainer = trainer


def test_the_pictures_show_what_the_network_says(train, monkeypatch):
    drawing = Drawing(monkeypatch)
    result = train(ON)
    data = drawing.trainer.datamodule
    images, targets = data.splits["test"].values[0], data.splits["test"].targets
    with torch.no_grad():
        logits = drawing.trainer.lightning_module.net(data.normalize(images))
    shares, predicted = logits.softmax(1).max(1)
    counts, _, title = drawing.matrices[-1]
    assert counts.diag().sum() / 75 == pytest.approx(result["test/acc"])
    assert counts[0, 1] == ((targets == 0) & (predicted == 1)).sum()
    wrong, right = ((predicted == targets) == x for x in (False, True))
    assert title == f"{wrong.sum()} of 75 wrong"

    order = (shares - 2 * right).argsort(descending=True)  # the worst mistakes first
    order[wrong.sum() :] = order[wrong.sum() :].flip(0)  # the least sure ones first
    assert 0 < wrong.sum() < 25
    shown, (text, *_), _ = drawing.grids[-1]
    assert torch.equal(shown, figures.displayable(images)[order[:25]])
    worst = order[0]
    said, true = (data.classes[x[worst]][:9] for x in (predicted, targets))
    assert text == f"{said} {shares[worst]:.0%}\nis {true}"


def test_predicted_numbers_are_drawn_over_true_ones(train, monkeypatch):
    drawing = Drawing(monkeypatch)
    train(ON, flags_of("regression"))
    points = drawing.figures["view/predictions/test"].axes[0].lines[0]
    x, y = outputs_of("regression")
    assert torch.equal(torch.as_tensor(points.get_xdata()), y.flatten())
    assert torch.equal(torch.as_tensor(points.get_ydata()), x.flatten())


def test_masks_lie_over_the_images(train, monkeypatch):
    drawing = Drawing(monkeypatch)
    train(ON, flags_of("segmentation"))
    x, y = outputs_of("segmentation")
    shown = figures.displayable(x[::4])
    parts = [shown, *(figures.overlay(shown, z[::4]) for z in (y, x.argmax(1)))]
    assert torch.equal(drawing.grids[-1][0], torch.cat(parts, 2))
    image = torch.full((1, 3, 1, 2), 0.8)
    (shown,) = figures.overlay(image, torch.tensor([[[-100, 1]]]))
    expected = [image[0, :, 0, 0], (0.8 + PALETTE[1] / 255) / 2]
    torch.testing.assert_close(shown[:, 0], torch.stack(expected, 1))
