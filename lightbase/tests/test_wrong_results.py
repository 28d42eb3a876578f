"""What ended well and was wrong: a test on training samples, a training of nothing,
weights that no validation has measured, and arguments changed for their names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from attached import attach
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import Callback, LightningModule
from paths import ACCELERATOR, TINY, argv, fails, script
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightbase.commands.arguments import read_command
from lightbase.core.config import write_config
from lightbase.core.data import BaseDataModule
from lightbase.core.folder import PROJECT

ME = "test_wrong_results"
ONE_EPOCH = "--trainer.max_epochs 1"
LINEAR = (
    "--model.net torch.nn.Linear --model.net.in_features 10 --model.net.out_features 2"
)


def best(folder: Path) -> Path:
    return folder / "checkpoints" / "best.ckpt"


def refused(capsys: Any, folder: Path, run: Any, status: int = 2) -> str:
    """What a training prints that ends in two lines and leaves no folder of a run."""
    error = fails(capsys, status, run)
    assert not [*folder.rglob("version_*")]
    return error


# 1. The test set of data that has none.


class OneFile(BaseDataModule):
    """Data without a test set, whose inputs tell which sample they are."""

    classes = ["even", "odd"]

    def load(self, split: Any) -> Any:
        part = self.seeded_part(100, split)
        inputs = torch.zeros(100, 10)
        inputs[:, 0] = torch.arange(100.0)
        return inputs[part], torch.arange(100)[part] % 2


ONE_FILE = f"{LINEAR} --data {ME}.OneFile --data.batch_size 20"


def samples(data: Any, split: str) -> set[float]:
    return set(data.splits[split].inputs[:, 0].tolist())


TOOLS = [
    "evaluate",
    *(pytest.param(tool, marks=pytest.mark.slow) for tool in ("predict", "export")),
]


@pytest.mark.parametrize("seed", [1, 7])
def test_each_split_seed_has_the_same_test_samples(seed: int) -> None:
    data = attach(OneFile(split_seed=seed))
    data.setup("test")
    first = attach(OneFile(), "test")
    assert samples(data, "test") == samples(first, "test")
    assert len(samples(data, "test")) == 20
    parts = [samples(data, split) for split in ("train", "val", "test")]
    assert set.union(*parts) == set(range(100))
    assert sum(map(len, parts)) == 100


SPLIT_FLAGS = [
    "--data.split_seed 2",
    "--data.init_args.split_seed 2",
    "--data.val_fraction 0.3",
    "--data.num_folds 5 --data.fold 0",
]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("flags", SPLIT_FLAGS)
def test_a_checkpoint_keeps_its_split(trained, tmp_path, capsys, tool, flags):
    folder, _ = trained(ONE_FILE, ONE_EPOCH)
    outputs = {"evaluate": [], "predict": ["--output", tmp_path / "rows.csv"]}
    outputs["export"] = ["--output", tmp_path / "net.pth"]
    words = argv("--ckpt_path", best(folder), *outputs[tool], flags)
    error = fails(capsys, 2, lambda: script(tool).main(words))
    assert "--data." in error
    assert "test may not have samples of the training" in error
    assert not [*tmp_path.iterdir()]


def as_yaml(file: Path, **data: Any) -> Path:
    """An experiment on OneFile, as a user writes it."""
    net = {
        "class_path": "torch.nn.Linear",
        "init_args": {"in_features": 10, "out_features": 2},
    }
    content = {
        "model": {"net": net},
        "data": {"class_path": f"{ME}.OneFile", "init_args": data},
        "trainer": {"accelerator": ACCELERATOR},
    }
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.parametrize("tool", TOOLS)
def test_a_config_of_another_split_is_refused(trained, tmp_path, capsys, tool):
    folder, _ = trained(ONE_FILE, ONE_EPOCH)
    config = as_yaml(tmp_path / "other.yaml", split_seed=2)
    output = [] if tool == "evaluate" else ["--output", tmp_path / "net.pth"]
    words = argv("--ckpt_path", best(folder), "--config", config, *output)
    error = fails(capsys, 2, lambda: script(tool).main(words))
    assert "--data.split_seed 2" in error


def test_a_config_without_the_folds_of_the_training_is_refused(
    trained, tmp_path, capsys
):
    """They may have been flags. The fold is the only test set that this data has."""
    folder, _ = trained(ONE_FILE, ONE_EPOCH, "--data.num_folds 5 --data.fold 1")
    config = as_yaml(tmp_path / "same.yaml")
    words = argv("--ckpt_path", best(folder), "--config", config)
    error = fails(capsys, 2, lambda: script("evaluate").main(words))
    assert "unknown argument" not in error


def test_a_run_of_version_0_3_keeps_its_test_set_with_a_config(trained, tmp_path):
    """There it followed from split_seed."""
    folder, _ = trained(ONE_FILE, ONE_EPOCH, "--data.split_seed 2")
    checkpoint = torch.load(best(folder), weights_only=True)
    checkpoint["OneFile"].pop("test_seed", None)
    older = tmp_path / "older.ckpt"
    torch.save(checkpoint, older)
    words = argv("--ckpt_path", older, "--trust_checkpoint")
    expected = script("evaluate").main(words)
    config = as_yaml(tmp_path / "same.yaml", split_seed=2)
    assert script("evaluate").main([*words, "--config", str(config)]) == expected


def test_after_a_fold_the_own_test_set_can_be_tested(trained, tmp_path):
    folder, metrics = trained("--data.num_folds 5 --data.fold 1", ONE_EPOCH)
    assert metrics["test/num_samples"] == 70
    words = argv("--ckpt_path", best(folder), "--data.num_folds null")
    assert script("evaluate").main(words)["test/num_samples"] == 75
    output = tmp_path / "rows.csv"
    script("predict").main([*words, "--output", str(output)])
    assert len(output.read_text().splitlines()) == 1 + 75


# 2. A training_step that returns no loss.


class Forgets(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.criterion(self.net(batch[0]), batch[1])


class ForgetsInBetween(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared(batch)

    def shared(self, batch: Any) -> None:
        self.criterion(self.net(batch[0]), batch[1])


class PlainForgets(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(192, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        nn.functional.cross_entropy(self.net(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Forgetting(Forgets):
    """Inherits the mistake."""


class ForgetsAnAssignedResult(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.shared(batch)  # type: ignore[func-returns-value]
        return loss  # noqa: RET504

    def shared(self, batch: Any) -> None:
        self.criterion(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("name", ["Forgets", "ForgetsInBetween", "Forgetting"])
def test_a_training_step_without_return_is_refused(train, tmp_path, capsys, name):
    run = lambda: train("--model", f"{ME}.{name}", ONE_EPOCH)  # noqa: E731
    error = refused(capsys, tmp_path, run)
    assert f"training_step of {name} returns nothing" in error


def test_a_plain_module_without_return_is_refused(tmp_path, capsys):
    flags = argv("--data.num_train 350 --trainer.accelerator", ACCELERATOR)
    root = ["--trainer.default_root_dir", str(tmp_path)]
    words = [
        "--model",
        f"{ME}.PlainForgets",
        "--data",
        "example.data.synthetic.SyntheticImages",
    ]
    run = lambda: script("train").main([*words, *flags, *root])  # noqa: E731
    assert "training_step of PlainForgets returns nothing" in refused(
        capsys, tmp_path, run
    )


class NeverALoss(Classifier):
    """The source does not tell that it skips each batch."""

    threshold = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss < self.threshold else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("name", ["NeverALoss", "ForgetsAnAssignedResult"])
@pytest.mark.parametrize(
    "flags",
    [
        ONE_EPOCH,
        "--trainer.accumulate_grad_batches 4",
        "--trainer.val_check_interval 5",
    ],
)
def test_a_training_in_which_no_batch_has_a_loss_fails(
    train, tmp_path, capsys, name, flags
):
    run = lambda: train("--model", f"{ME}.{name}", flags)  # noqa: E731
    error = refused(capsys, tmp_path, run, status=1)
    assert f"training_step of {name} returned None in all batches of epoch 1" in error


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_single_batches_may_have_no_loss_but_not_all(
    train, tmp_path, capsys, monkeypatch
):
    run = lambda: train(f"--model {ME}.NeverALoss --trainer.max_steps 3")  # noqa: E731
    assert "nothing was trained" in refused(capsys, tmp_path, run, status=1)
    monkeypatch.setattr(NeverALoss, "threshold", 1.4)  # the first batches have more
    assert train(f"--model {ME}.NeverALoss", ONE_EPOCH)["test/acc"] > 0


# 3. The length of a schedule by steps.

GRADUAL = [
    "--trainer.callbacks lightning.pytorch.callbacks.GradientAccumulationScheduler",
    *("--trainer.callbacks.scheduling", "{0: 1, 1: 4}"),
]


def schedule_of(folder: Path) -> Any:
    """The state of the schedule at the end of the training."""
    file = folder / "tiny" / "version_0" / "checkpoints" / "last.ckpt"
    (schedule,) = torch.load(file, weights_only=True)["lr_schedulers"]
    return schedule


@pytest.mark.parametrize("name", ["OneCycleLR", "WarmupCosineLR", "FinalDecayLR"])
def test_a_schedule_of_unknown_length_is_refused(train, tmp_path, capsys, name):
    run = lambda: train("--model.scheduler", name, *GRADUAL)  # noqa: E731
    assert "GradientAccumulationScheduler" in refused(capsys, tmp_path, run)
    train("--model.scheduler", name, "--trainer.accumulate_grad_batches 4")
    schedule = schedule_of(tmp_path)
    assert schedule["last_epoch"] == schedule["total_steps"] == 10


@pytest.mark.parametrize(
    ("name", "arguments", "num_steps"),
    [
        ("OneCycleLR", "{total_steps: 24}", 19 + 5),
        ("StepLR", "{step_size: 1, gamma: 0.1}", 2),
        ("CosineAnnealingLR", "{}", 2),
    ],
)
def test_a_schedule_that_knows_its_length_trains(
    train, tmp_path, capsys, name, arguments, num_steps
):
    refused(capsys, tmp_path, lambda: train("--model.scheduler OneCycleLR", *GRADUAL))
    train(*GRADUAL, "--model.scheduler", name, "--model.scheduler_args", arguments)
    assert schedule_of(tmp_path)["last_epoch"] == num_steps


# 4. Weights that change between a validation and best.ckpt.


@torch.no_grad()
def shrink(tensors: Any) -> None:
    for tensor in tensors:
        tensor.mul_(0.9)


class AtEpochEnd(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        shrink(pl_module.parameters())


class AtValidationEpochEnd(Callback):
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            shrink(pl_module.parameters())


class AtValidationEnd(Callback):
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            shrink(pl_module.parameters())


class WhenSaved(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        weights = {name: x.clone() for name, x in checkpoint["state_dict"].items()}
        shrink(weights.values())
        checkpoint["state_dict"] = weights


class AfterBatches(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        shrink(pl_module.parameters())


class OneLayer(Callback):
    """Clips the last layer only."""

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        [*pl_module.parameters()][-1].clamp_(-0.01, 0.01)


class ModuleShrinks(Classifier):
    def on_train_epoch_end(self) -> None:
        shrink(self.parameters())


class OwnAverage(Callback):
    """Validates and saves a mean of the weights."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.mean = {name: x.clone() for name, x in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, x in pl_module.state_dict().items():
            self.mean[name].lerp_(x, 0.1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.own = {name: x.clone() for name, x in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.mean)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.own)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {name: x.clone() for name, x in self.mean.items()}


class ForgottenAverage(OwnAverage):
    """Validates the mean, and saves the others."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        pass


def with_callback(path: str, **init_args: Any) -> list[str]:
    flags = [f"--trainer.callbacks={path}"]
    return flags + [
        f"--trainer.callbacks.{key}={value}" for key, value in init_args.items()
    ]


PRUNING = with_callback(
    "lightning.pytorch.callbacks.ModelPruning", pruning_fn="l1_unstructured", amount=0.5
)
CHANGES = {
    "AtEpochEnd": with_callback(f"{ME}.AtEpochEnd"),
    "AtValidationEpochEnd": with_callback(f"{ME}.AtValidationEpochEnd"),
    "AtValidationEnd": with_callback(f"{ME}.AtValidationEnd"),
    "WhenSaved": with_callback(f"{ME}.WhenSaved"),
    "OneLayer": with_callback(f"{ME}.OneLayer"),
    "ForgottenAverage": with_callback(f"{ME}.ForgottenAverage"),
    "ModelPruning": PRUNING,
    "ModuleShrinks": ["--model", f"{ME}.ModuleShrinks"],
}


def most_are_slow(names: Any) -> list[Any]:
    """Parameters, of which one in three is for the quick tests."""
    marks = [[pytest.mark.slow] * (i % 3 > 0) for i, _ in enumerate(names)]
    return [
        pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)
    ]


@pytest.mark.parametrize("name", most_are_slow(CHANGES))
def test_weights_that_change_after_their_validation_end_the_run(
    train, tmp_path, capsys, name
):
    run = lambda: train(ONE_EPOCH, *CHANGES[name])  # noqa: E731
    error = refused(capsys, tmp_path, run, status=1)
    assert f"{name} changes the weights between a validation and best.ckpt" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--trainer.val_check_interval 5", "--trainer.precision 64-true"]
)
def test_they_end_a_run_with_these_flags_too(train, tmp_path, capsys, flags):
    run = lambda: train(flags, ONE_EPOCH, *CHANGES["WhenSaved"])  # noqa: E731
    assert "WhenSaved changes the weights" in refused(capsys, tmp_path, run, status=1)


LIGHTNING = "lightning.pytorch.callbacks"


def test_a_callback_that_only_stops_is_not_named(train, tmp_path, capsys):
    stops = with_callback(f"{LIGHTNING}.EarlyStopping", monitor="val/loss")
    run = lambda: train(ONE_EPOCH, *CHANGES["ModuleShrinks"], *stops)  # noqa: E731
    error = refused(capsys, tmp_path, run, status=1)
    assert "ModuleShrinks" in error
    assert "EarlyStopping" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "allowed",
    [
        with_callback(f"{LIGHTNING}.WeightAveraging"),
        with_callback(f"{LIGHTNING}.EMAWeightAveraging", decay=0.9),
        with_callback(f"{ME}.OwnAverage"),
        with_callback(f"{ME}.AfterBatches"),
        [*with_callback(f"{ME}.AtEpochEnd"), "--monitor=null"],
    ],
)
def test_what_is_validated_is_what_is_tested_again(train, tmp_path, capsys, allowed):
    refused(
        capsys, tmp_path, lambda: train(ONE_EPOCH, *CHANGES["AtEpochEnd"]), status=1
    )
    found = train(*allowed)
    again = script("evaluate").main(
        argv("--ckpt_path", best(tmp_path / "tiny" / "version_0"))
    )
    assert again["test/loss"] == pytest.approx(found["test/loss"], rel=1e-6)


# 5. Predictions in the precision of the run.


class Sees(Classifier):
    """Keeps what its tests see."""

    seen: list[Tensor] = []

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = super().test_step(batch, batch_idx)
        self.seen.append(logits.softmax(1).cpu())
        return logits


def rows(*args: object) -> Any:
    """The arrays that predict.py writes."""
    words = argv(*args)
    script("predict").main(words)
    return np.load(words[words.index("--output") + 1])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_predictions_are_what_the_test_has_measured(trained, tmp_path, precision):
    flags = f"--model {ME}.Sees --trainer.precision {precision}"
    folder, metrics = trained(flags, ONE_EPOCH)
    Sees.seen.clear()
    words = ["--ckpt_path", best(folder)]
    measured = script("evaluate").main(argv(*words))
    found = rows(*words, "--output", tmp_path / "rows.npz")["prediction"]
    assert measured["test/acc"] == metrics["test/acc"]
    assert (torch.from_numpy(found) == torch.cat(Sees.seen)).all()
    script("predict").main(argv(*words, "--output", tmp_path / "rows.csv"))
    lines = [line.split(",") for line in (tmp_path / "rows.csv").read_text().split()]
    right = [line[1] == line[-1] for line in lines[1:]]
    assert np.float32(sum(right) / 75) == np.float32(measured["test/acc"])


def test_predictions_take_the_flags_of_the_test(trained, tmp_path):
    folder, _ = trained(f"--model {ME}.Sees --trainer.precision bf16-mixed", ONE_EPOCH)
    words = [
        "--ckpt_path",
        best(folder),
        "--trainer.precision 64-true --data.num_test 40",
    ]
    Sees.seen.clear()
    script("evaluate").main(argv(*words))
    found = rows(*words, "--data.batch_size=7", "--output", tmp_path / "rows.npz")[
        "prediction"
    ]
    assert len(found) == 40
    assert found.dtype == np.float64
    torch.testing.assert_close(torch.from_numpy(found), torch.cat(Sees.seen))


def test_files_stand_among_flags_of_the_trainer(trained, tmp_path):
    folder, _ = trained(f"--model {ME}.Sees --trainer.precision bf16-mixed", ONE_EPOCH)
    images, _ = SyntheticImages((3, 8, 8), 4, num_test=75, noise=0.05).load("test")
    files = [tmp_path / f"{name}.png" for name in "abc"]
    for file, image in zip(files, images, strict=False):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    words = ["--ckpt_path", best(folder), "--output", tmp_path / "rows.npz"]
    found = rows(*words, files[0], f"--trainer.accelerator {ACCELERATOR}", *files[1:])
    assert found["names"].tolist() == [*map(str, files)]
    every = rows(*words)["prediction"]
    assert (found["prediction"] == every[:3]).all()


def test_predictions_of_files_need_no_data_set(trained, tmp_path, monkeypatch):
    folder, _ = trained(ONE_EPOCH)
    monkeypatch.setattr(
        SyntheticImages, "load", lambda self, split: pytest.fail("it is loaded")
    )
    monkeypatch.setattr(
        SyntheticImages, "prepare_data", lambda self: pytest.fail("it is made")
    )
    image = tmp_path / "black.png"
    Image.new("RGB", (5, 5)).save(image)
    words = ["--ckpt_path", best(folder), image, "--output", tmp_path / "rows.npz"]
    assert rows(*words)["names"].tolist() == [str(image)]


# 6. Parts of a batch that normalize and augment do not get.


class Scaling:
    def normalize(self, inputs: Tensor) -> Tensor:
        return inputs / 2


class ForAll:
    """Changes each part."""

    def transform_batch(self, batch: Any, training: bool) -> Any:
        first, *others = batch
        return [first / 2, *others]


class Parts(BaseDataModule):
    """Zeros: inputs and other parts of these shapes."""

    shapes: list[tuple[int, ...]] = []

    def load(self, split: Any) -> Any:
        return tuple(torch.zeros(40, *shape) for shape in self.shapes)


class Labels(Parts):
    def load(self, split: Any) -> Any:
        (inputs,) = super().load(split)
        return inputs, torch.ones(40, 4, dtype=torch.int64)


class ScaledImages(Scaling, Parts):
    shapes = [(3, 4, 4), (3, 4, 4)]


class TwoInputs(Scaling, Parts):
    shapes = [(4,), (4,), (1,)]


class SameVectors(Scaling, Parts):
    shapes = [(4,), (4,)]


class Weighted(Scaling, Parts):
    shapes = [(4,), (1,), ()]


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 4, 4), torch.zeros(3, 4, 4)


class OfDataset(Scaling, BaseDataModule):
    def load(self, split: Any) -> Any:
        return Items()


class Column(Scaling, Parts):
    shapes = [(1,), (1,)]


class ManyLabels(Scaling, Labels):
    shapes = [(4,)]


class Anything(LightningModule):
    """Takes any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.scale * batch[0].float().mean()).square()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def on_data(folder: Path, name: str) -> Any:
    flags = argv(
        f"--model {ME}.Anything --data {ME}.{name} --data.batch_size 10", ONE_EPOCH
    )
    flags += argv(
        f"--trainer.accelerator {ACCELERATOR} --figures_every_n_epochs 0 --step_timer false"
    )
    flags += argv("--trainer.log_every_n_steps 1 --device_monitor false")
    flags += argv("--trainer.default_root_dir", folder)
    return script("train").main(flags)


UNCHANGED = ["ScaledImages", "TwoInputs", "SameVectors", "Weighted", "OfDataset"]


@pytest.mark.parametrize("name", UNCHANGED)
def test_parts_that_would_stay_unchanged_are_refused(
    tmp_path, capsys, monkeypatch, name
):
    error = refused(capsys, tmp_path, lambda: on_data(tmp_path, name))
    assert name in error
    assert "override transform_batch" in error
    monkeypatch.setattr(
        globals()[name], "transform_batch", ForAll.transform_batch, raising=False
    )
    assert on_data(tmp_path, name)["epochs"] == 1


@pytest.mark.parametrize("allowed", ["Column", "ManyLabels"])
def test_targets_that_are_no_inputs_are_not_refused(tmp_path, capsys, allowed):
    refused(capsys, tmp_path, lambda: on_data(tmp_path, "TwoInputs"))
    assert on_data(tmp_path, allowed)["epochs"] == 1


# 8. Arguments are what they are by their types, not by their names.


class Named(Classifier):
    """Arguments whose names look like paths."""

    def __init__(
        self,
        pretrained_model_name_or_path: str = "bert-base-uncased",
        vocabulary_path: Path | None = None,
        files: list[Path] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name, self.vocabulary = pretrained_model_name_or_path, vocabulary_path
        self.files = files


class NamedData(SyntheticImages):
    def __init__(
        self,
        hub_path: str = "stanfordnlp/imdb",
        cache_dir: str | None = None,
        server_uri: str = "rest/api",
        label_column: str = "label",
        table: Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.names = [hub_path, cache_dir, server_uri, label_column]
        self.table = table


NAMED = {"model": f"{ME}.Named", "data": f"{ME}.NamedData"}


def parsed(*args: object, config: str = TINY) -> Any:
    return script("train").parse(argv("--config", config, *args))


def config_of(cli: Any) -> Any:
    """What config.yaml holds."""
    return write_config(cli.parser, cli.config)[0]


def experiment(folder: Path, model: dict[str, Any], data: dict[str, Any]) -> str:
    """tiny.yaml with Named and NamedData, and these arguments, in a file."""
    content = yaml.safe_load(Path(TINY).read_text())
    content["model"] = {
        "class_path": NAMED["model"],
        "init_args": {"net": content["model"]["net"], **model},
    }
    content["data"]["class_path"] = NAMED["data"]
    content["data"]["init_args"] |= data
    file = folder / "named.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


@pytest.mark.parametrize("form", ["default", "flags", "yaml"])
def test_text_arrives_unchanged_whatever_its_name(tmp_path, form):
    model: dict[str, Any] = {"pretrained_model_name_or_path": "org/net"}
    data: dict[str, Any] = {
        "hub_path": "org/set",
        "cache_dir": "cache",
        "server_uri": "a/b",
    }
    data |= {"label_column": "Discs"}
    args = ["--model", NAMED["model"], "--data", NAMED["data"]]
    config = TINY
    if form == "default":
        model = {"pretrained_model_name_or_path": "bert-base-uncased"}
        data = dict(
            zip(data, ["stanfordnlp/imdb", None, "rest/api", "label"], strict=True)
        )
    elif form == "flags":
        args += [f"--model.{key}={value}" for key, value in model.items()]
        args += [f"--data.{key}={value}" for key, value in data.items()]
    else:
        args, config = [], experiment(tmp_path, model, data)
    cli = parsed(*args, config=config)
    assert cli.model.name == model["pretrained_model_name_or_path"]
    assert cli.datamodule.names == [*data.values()]
    written = config_of(cli)
    assert written["data"]["init_args"].items() >= data.items()
    assert written["model"]["init_args"].items() >= model.items()


@pytest.mark.parametrize("form", ["flags", "yaml"])
def test_a_path_is_absolute_whatever_its_name(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    model = {"vocabulary_path": "words.txt", "files": ["a.csv", "b/c.csv"]}
    if form == "flags":
        args = [
            "--model",
            NAMED["model"],
            "--data",
            NAMED["data"],
            "--data.table",
            "x.csv",
        ]
        args += [
            "--model.vocabulary_path",
            "words.txt",
            "--model.files",
            "[a.csv, b/c.csv]",
        ]
        cli = parsed(*args)
    else:
        cli = parsed(config=experiment(tmp_path, model, {"table": "x.csv"}))
    assert cli.model.vocabulary == tmp_path / "words.txt"
    assert cli.model.files == [tmp_path / "a.csv", tmp_path / "b" / "c.csv"]
    assert cli.datamodule.table == tmp_path / "x.csv"
    written = config_of(cli)
    assert written["data"]["init_args"]["table"] == str(tmp_path / "x.csv")
    assert written["model"]["init_args"]["vocabulary_path"] == str(
        tmp_path / "words.txt"
    )
    assert written["model"]["init_args"]["files"][1] == str(tmp_path / "b" / "c.csv")


def test_only_an_argument_of_a_class_takes_a_bare_name(tmp_path):
    args = ["--model.net=MLP", "--model.net.sizes=[192,4]", "--data.label_column=Discs"]
    cli = parsed(f"--data {NAMED['data']}", *args)
    assert type(cli.model.net).__name__ == "MLP"
    assert cli.datamodule.names[-1] == "Discs"
    assert parsed("--data Discs --model.net.sizes [1024,2]").datamodule.image_shape == (
        1,
        32,
        32,
    )
    content = yaml.safe_load(Path(TINY).read_text())
    content["model"]["net"]["class_path"] = "MLP"
    content["data"]["class_path"] = "SyntheticImages"
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(content))
    cli = parsed(config=str(tmp_path / "bare.yaml"))
    assert type(cli.model.net).__name__ == "MLP"
    assert (
        config_of(cli)["model"]["init_args"]["net"]["class_path"]
        == "example.models.mlp.MLP"
    )


# 9. Killed before the first checkpoint.


class Killed(BaseException):
    """As kill -9: nothing more happens."""


class Kills(Callback):
    hook = "setup"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.kill("setup")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.kill("on_fit_start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.kill("on_train_batch_end")

    def kill(self, hook: str) -> None:
        if hook == self.hook:
            raise Killed


@pytest.mark.parametrize("hook", ["setup", "on_fit_start"])
def test_a_run_that_is_killed_at_once_starts_again(train, tmp_path, monkeypatch, hook):
    monkeypatch.setattr(Kills, "hook", hook)
    with pytest.raises(Killed):
        train(f"--trainer.callbacks {ME}.Kills --model.lr 0.02", ONE_EPOCH)
    monkeypatch.setattr(Kills, "hook", "")
    file = tmp_path / "tiny" / "version_0" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    assert config["model"]["init_args"]["lr"] == 0.02
    words = argv("--name tiny --ckpt_path last --trainer.default_root_dir", tmp_path)
    assert script("train").main(words)["epochs"] == 1
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["version_0"]
    again = yaml.safe_load(file.read_text())
    assert (again["model"], again["data"]) == (config["model"], config["data"])


@pytest.mark.parametrize(
    "more", ["", "--model example.classifier.Classifier", "--model.lr 0.1"]
)
def test_a_folder_with_nothing_in_it_does_not_become_another_experiment(
    train, tmp_path, capsys, more
):
    empty = tmp_path / "tiny" / "version_3"
    empty.mkdir(parents=True)
    words = argv("--name tiny --ckpt_path last --trainer.default_root_dir", tmp_path)
    error = fails(capsys, 2, lambda: script("train").main([*words, *more.split()]))
    assert "before it had a config or a checkpoint" in error
    assert [*(tmp_path / "tiny").iterdir()] == [empty]
    train("--name tiny --ckpt_path last", ONE_EPOCH)  # names its experiment


# 10. Without configs/default.yaml.


@pytest.fixture
def without_default(monkeypatch, tmp_path):
    """A repository whose user has deleted it."""
    repository = tmp_path / "repository"
    (repository / "configs").mkdir(parents=True)
    (repository / "configs" / "mine.yaml").write_text(Path(TINY).read_text())
    monkeypatch.setattr(PROJECT, "root", repository)
    return repository


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "train --trainer.max_epochs 1",
        "train --model example.classifier.Classifier",
        "train --data example.data.synthetic.SyntheticImages",
        "train --ckpt_path last",
        "tune",
        "tune --find lr",
        "sweep --search model.lr=0.1,0.2",
    ],
)
def test_without_a_default_a_command_has_to_name_its_experiment(
    without_default, capsys, command
):
    name, *words = command.split()
    error = fails(capsys, 2, lambda: script(name).main(words))
    assert "give --config FILE, or both --model CLASS and --data CLASS" in error
    assert [path.name for path in without_default.iterdir()] == ["configs"]


def test_without_a_default_an_unknown_run_has_two_lines(
    without_default, tmp_path, capsys
):
    words = argv("--name x --ckpt_path last --trainer.default_root_dir", tmp_path)
    fails(capsys, 1, lambda: script("train").main(words))
    (tmp_path / "x" / "version_0").mkdir(parents=True)
    error = fails(capsys, 2, lambda: script("train").main(words))
    assert "name the experiment with --config" in error


def test_the_help_without_a_default_says_how_to_name_an_experiment(
    without_default, capsys
):
    with pytest.raises(SystemExit) as caught:
        read_command(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "Give --config FILE, or --model CLASS and --data CLASS." in text
    assert "mine" in text
    assert "default.yaml" not in text
