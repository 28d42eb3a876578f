"""What a user's subclass of the Classifier or BaseModule assigns and overrides takes
effect, and breaks nothing."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Trainer, seed_everything
from paths import ACCELERATOR, Train, script
from stops import Terminate
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from written import curves, equal, weights

from lightbase.core.batches import EpochBatchSampler

HERE = "test_system"
ONE_EPOCH = ("--trainer.max_epochs", 1, "--trainer.log_every_n_steps", 1)
PLATEAU = (
    "--model.scheduler",
    "ReduceLROnPlateau",
    "--model.scheduler_args.patience",
    0,
)
PLATEAU += (
    "--model.scheduler_args.threshold=1000",
    "--model.scheduler_args.threshold_mode=abs",
)


def folder(tmp_path: Path, name: str = "tiny") -> Path:
    return tmp_path / name / "version_0"


def evaluate(tmp_path: Path, name: str = "tiny") -> dict[str, Any]:
    path = folder(tmp_path, name) / "checkpoints" / "best.ckpt"
    return script("evaluate").main(["--ckpt_path", str(path)])


def of_test(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name.startswith("test")}


def tiny_data() -> SyntheticImages:
    data = SyntheticImages(
        image_shape=(3, 8, 8), num_classes=4, num_train=350, num_test=75, noise=0.05
    )
    data.setup("fit")
    data.setup("test")
    return data


# what a subclass assigns


class Weighted(Classifier):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2, 2.0]))


def test_the_criterion_that_is_assigned_trains_and_is_shown(
    train: Train, tmp_path: Path
) -> None:
    """Against a plain loop over the same batches."""
    result = train("--model", f"{HERE}.Weighted", *ONE_EPOCH)
    criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2, 2.0]))
    seed_everything(42, workers=True)
    data = tiny_data()
    net = MLP([192, 16, 4])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for indices in EpochBatchSampler(315, 16, shuffle=True, drop_last=True, seed=42):
        x, y = data.splits["train"].__getitems__(indices)
        loss = criterion(net(data.normalize(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    points = curves(folder(tmp_path))
    assert [value for _, value in points["train/loss"]] == pytest.approx(
        losses, rel=1e-4
    )
    x, y = data.splits["test"].inputs, data.splits["test"].targets
    with torch.no_grad():
        logits = net(data.normalize(x))
    parts = zip(logits.split(16), y.split(16), strict=True)
    mean = sum(criterion(*part).item() * len(part[1]) for part in parts) / len(y)
    assert result["test/loss"] == pytest.approx(mean, rel=1e-4)
    assert evaluate(tmp_path) == of_test(result)


class OwnMetrics(Classifier):
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        f1, accuracy = MulticlassF1Score(4), MulticlassAccuracy(4, average="micro")
        self.metrics = {
            "collection": MetricCollection({"f1": f1, "accuracy": accuracy}),
            "single": f1,
            "none": {},
        }[kind]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("collection", {"f1", "accuracy"}),
        ("single", {"MulticlassF1Score"}),
        ("none", set()),
    ],
)
def test_the_metrics_that_are_assigned_are_measured(train, tmp_path, kind, names):
    result = train("--model", f"{HERE}.OwnMetrics", "--model.kind", kind)
    assert of_test(result).keys() == {
        f"test/{name}" for name in {"loss", "num_samples", *names}
    }
    tags = curves(folder(tmp_path)).keys() - {"lr"}
    assert tags >= {
        f"{stage}/{name}" for stage in ("train", "val") for name in {"loss", *names}
    }
    assert evaluate(tmp_path) == of_test(result)


class OwnOptimizer(Classifier):
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lr, self.optimizer_args = (0.05, {}) if kind != "object" else (1.0, {})
        choices: dict[str, Callable[[], Any]] = {
            "name": lambda: "SGD",
            "function": lambda: (
                lambda parameters, lr: SGD([*parameters], lr, momentum=0.5)
            ),
            "object": lambda: SGD(self.parameters(), lr=0.05),
        }
        self.optimizer = choices[kind]()


PLAIN = ("--model.optimizer", "SGD", "--model.lr", 0.05)
MOMENTUM = (*PLAIN, "--model.optimizer_args.momentum", 0.5)


@pytest.mark.parametrize(
    ("kind", "flags"), [("name", PLAIN), ("function", MOMENTUM), ("object", PLAIN)]
)
def test_the_optimizer_that_is_assigned_trains_and_resumes(
    train, trained, tmp_path, kind, flags
):
    own = ("--model", f"{HERE}.OwnOptimizer", "--model.kind", kind)
    train(*own, "--trainer.max_epochs", 1)
    train(*own, "--ckpt_path", "last", "--trainer.max_epochs", 2)
    resumed, expected = weights(folder(tmp_path)), weights(trained(*flags)[0])
    for name, value in expected.items():
        torch.testing.assert_close(
            resumed[name], value
        )  # a fused step rounds otherwise
    rates = [rate for _, rate in curves(folder(tmp_path))["lr"]]
    assert rates == pytest.approx([0.05] * len(rates))


class OwnScheduler(Classifier):
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if kind == "name":
            self.scheduler, self.scheduler_args = "StepLR", {"step_size": 1}
        else:
            self.optimizer = SGD(self.parameters(), lr=self.lr)
            self.scheduler = StepLR(self.optimizer, step_size=1)


@pytest.mark.parametrize(
    "kind", ["name", pytest.param("object", marks=pytest.mark.slow)]
)
def test_the_scheduler_that_is_assigned_steps_and_resumes(train, tmp_path, kind):
    flags: Any = ("--model", f"{HERE}.OwnScheduler", "--model.kind", kind)
    flags += ("--trainer.log_every_n_steps", 19)
    train(*flags, "--trainer.max_epochs", 2)
    train(*flags, "--trainer.max_epochs", 3, "--ckpt_path", "last")
    assert [rate for _, rate in curves(folder(tmp_path))["lr"]] == pytest.approx(
        [1e-2, 1e-3, 1e-4]
    )


# what a subclass overrides


class NoSuper(Classifier):
    """Every hook that the curves, the schedule and the resume could have lived in,
    without super()."""

    num_calls = 0

    def count(self, *_: Any, **__: Any) -> None:
        NoSuper.num_calls += 1

    setup = on_fit_start = on_fit_end = on_train_start = on_train_end = count
    on_train_epoch_start = on_train_epoch_end = on_train_batch_start = (
        on_train_batch_end
    ) = count
    on_validation_start = on_validation_end = on_validation_epoch_start = (
        on_validation_epoch_end
    ) = count
    on_validation_batch_start = on_validation_batch_end = on_test_batch_start = (
        on_test_batch_end
    ) = count
    on_test_start = on_test_end = on_test_epoch_start = on_test_epoch_end = teardown = (
        count
    )
    on_save_checkpoint = on_load_checkpoint = on_before_zero_grad = (
        on_after_backward
    ) = count

    def configure_callbacks(self) -> list[Any]:
        return []


def test_hooks_may_be_overridden_without_super(train, tmp_path, monkeypatch):
    flags = (*PLATEAU, "--model.scheduler_args.mode", "max", "--trainer.max_epochs", 3)
    plain = train(*flags, "--name", "plain")
    flags += (
        "--model",
        f"{HERE}.NoSuper",
        "--trainer.callbacks",
        "stops.Terminate",
    )
    monkeypatch.setattr(Terminate, "at_batch", 7)
    with pytest.raises(SystemExit):
        train(*flags)
    monkeypatch.setattr(Terminate, "at_batch", None)
    monkeypatch.setattr(NoSuper, "num_calls", 0)
    resumed = train(*flags, "--ckpt_path", "last")
    assert NoSuper.num_calls > 100
    assert {**resumed, "train_seconds": 0} == {**plain, "train_seconds": 0}
    folders = folder(tmp_path), folder(tmp_path, "plain")
    assert equal(*map(weights, folders))
    points, expected = map(curves, folders)
    assert points == expected
    assert points["lr"][-1][1] == pytest.approx(
        1e-3
    )  # after a validation that is not good enough


# without the engine


def make_classifier() -> tuple[Classifier, tuple[Tensor, Tensor]]:
    return Classifier(MLP([12, 4]), num_classes=4), (
        torch.rand(8, 3, 2, 2),
        torch.randint(4, (8,)),
    )


def test_the_steps_work_without_a_trainer() -> None:
    model, batch = make_classifier()
    loss = model.training_step(batch, 0)
    assert loss.item() == pytest.approx(
        nn.functional.cross_entropy(model(batch[0]), batch[1]).item()
    )
    assert model.validation_step(batch, 0).shape == (8, 4)
    assert model.predict_step(batch, 0).sum(1).tolist() == pytest.approx([1] * 8)


@pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning"
)  # a call inside Lightning 2.6
def test_a_plain_trainer_has_the_curves_too(tmp_path: Path) -> None:
    data = SyntheticImages(
        image_shape=(3, 2, 2), num_classes=4, num_train=100, num_test=20, batch_size=10
    )
    model, _ = make_classifier()
    options: Any = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    options |= {"accelerator": ACCELERATOR, "devices": 1, "enable_model_summary": False}
    options |= {"default_root_dir": tmp_path}
    trainer = Trainer(max_epochs=2, log_every_n_steps=5, **options)
    trainer.fit(model, data)
    assert {
        "train/loss",
        "train/acc",
        "val/loss",
        "val/acc",
    } <= trainer.callback_metrics.keys()
    assert trainer.test(model, data, verbose=False)[0]["test/num_samples"] == 20


@pytest.mark.slow
def test_an_evaluation_leaves_the_compiled_training_as_it_is() -> None:
    sizes = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.extend(value for value in inputs if isinstance(value, torch.SymInt))
        return graph.forward

    torch.compiler.reset()
    importlib.import_module("torch._dynamo").register_backend(backend, name="sizes")
    model = Classifier(MLP([12, 4]), num_classes=4, compile_net="sizes")
    model.trainer = Trainer(accelerator="cpu", logger=False)
    model.prepare_net(trains=True)
    for num_samples in (4, 8, 4, 3):
        model.net(torch.rand(num_samples, 3, 2, 2))
    assert sizes == []


class OwnGroups(Classifier):
    def __init__(self, which: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parameter_groups = {which: {"lr": 0.1}}


def test_groups_that_the_code_has_changed_are_refused_in_a_resume(
    train, capsys, monkeypatch
):
    train("--model", f"{HERE}.OwnGroups", "--model.which", "layers.1", *ONE_EPOCH)
    build = OwnGroups.__init__
    changed = lambda self, which, **kwargs: build(self, "layers.3", **kwargs)  # noqa: E731
    monkeypatch.setattr(OwnGroups, "__init__", changed)
    with pytest.raises(SystemExit):
        train("--ckpt_path", "last", "--trainer.max_epochs", 2)
    assert (
        "OwnGroups has the parameter_groups {'layers.3': {'lr': 0.1}}"
        in capsys.readouterr().err
    )
