"""`lightbase.train`, `lightbase.load` and the pictures of what a network gets right and
wrong, for scripts and notebooks.

`train` does what scripts/train.py does, with a config file or with objects.
"""

import contextlib
import copy
import inspect
import json
from operator import methodcaller
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader

from lightbase.commands import train as command
from lightbase.commands.checkpoint import Result, open_run
from lightbase.commands.flags import checkpoint_file
from lightbase.commands.script import python_errors
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError, say
from lightbase.config.files import Values, relative_to_cwd
from lightbase.config.parser import parser_of
from lightbase.config.paths import PROJECT
from lightbase.config.spec import CommandLine, read_spec
from lightbase.data.module import ArrayData, loader_data
from lightbase.model.curves import RunFolder
from lightbase.model.module import BaseModule
from lightbase.run.fit import best_checkpoint
from lightbase.run.record import recorder_of
from lightbase.setup.build import begin, instantiate
from lightbase.setup.load import load_run, read_checkpoint, restore
from lightbase.setup.resume import find_restart, load_restart, resumed_spec
from lightbase.watch.figures import PredictionFigures
from lightbase.watch.log import copied_output

BEGUN = "weights_before_training"
"""The attribute in which a module keeps its first weights."""


def load(
    path: str | Path,
    module: LightningModule | None = None,
    data: LightningDataModule | None = None,
    trust: bool = False,
) -> tuple[LightningModule, LightningDataModule]:
    """Return the module and the data of a run, with its weights, on the CPU.

    path: The name of a run, NAME or NAME/version_N, "last" or "best", or the path of a
        checkpoint, as for --ckpt_path of the scripts.
    module, data: Objects that take the weights and the state of the checkpoint. Without
        a module, both are built from the config in it. The config names classes, so the
        file has to be in your folder of runs. Data of arrays needs no object.
    trust: Open a file from anywhere. Use it only for a file that you would run as a
        program.
    Raise UserError for a file that is damaged, is somebody else's, or fits other
    classes.
    """
    quiet_lightning()
    with python_errors():
        file = checkpoint_file(str(path), PROJECT.logs)
        if module is None:
            _, module, data = load_run(file, trust=trust)
            return module, data
        checkpoint = read_checkpoint(file)
        if data is None and ArrayData.__name__ not in checkpoint:
            raise UserError("the data of this run is an object: give it, too")
        data = data or ArrayData()
        restore(checkpoint, module, data, file)
        return module, data


def train(
    module: LightningModule | str | Path,
    data: Any = None,
    *,
    val: Any = None,
    test: Any = None,
    trust: bool = False,
    reset: bool = False,
    **flags: Any,
) -> Result:
    """Train and test as `python scripts/train.py` does, with the same folder, curves
    and checkpoints. Return the content of metrics.json, with more attributes.

    module: It has the best weights afterwards. Or a config file: then `data` has
        settings that differ from it, by the names of flags:
        `train("configs/mnist_mlp.yaml", {"model.lr": 0.01})`. Every script can open
        such a run. `lightbase.load(path, module, data)` opens a run of objects.
    data: A data module, a pair (inputs, targets) of arrays, a Dataset, or a DataLoader.
    val, test: Samples for validation and test, of the same kind as `data`, if this is
        no data module. Without `val`, a tenth of arrays and Datasets is for validation.
    trust: Continue a training also from a file that is not in your folder of runs.
    reset: Give a module that has been trained before the weights that it had before its
        first training. Otherwise its weights go on, and a line says so.
    flags: Flags of train.py by their last names, and arguments of Lightning's Trainer:
        max_epochs=3, name="try", monitor="val/loss", ckpt_path="last",
        callbacks=[EMA()]. With arrays or Datasets also arguments of `ArrayData`, such
        as batch_size=32.
    Raise UserError for a mistake. After Ctrl-C save the state, then raise
    KeyboardInterrupt.
    """
    quiet_lightning()
    way_out = '; the same call with ckpt_path="last" continues'
    is_yaml = isinstance(module, str | Path)
    model: Any = module
    flags = {"trust_checkpoint": trust, **flags}
    parts = {"train": data, "val": val, "test": test}
    if isinstance(test, bool):
        flags["test"] = parts.pop("test")
    parts = {split: parts[split] for split in parts if parts[split] is not None}
    with python_errors(way_out), copied_output() as log:
        has_samples = not is_yaml and not isinstance(data, LightningDataModule)
        if not has_samples and parts.keys() - {"train"}:
            raise UserError("val and test belong to arrays: a data module has its own")
        if is_yaml:
            args, objects = as_arguments((data or {}) | flags)
            spec, model, data = command.parse([f"--config={module}", *args])
            spec.trainer |= objects
        else:
            begin_module(model, reset, continues=bool(flags.get("ckpt_path")))
            spec, data = of_objects(model, parts, flags)
        metrics = command.train_parsed(spec, model, data, log)
        best = best_checkpoint(model.trainer)
        if best:
            restore(read_checkpoint(best), model, data, best)  # as a test does
        return Result(metrics, model)


def begin_module(module: LightningModule, reset: bool, continues: bool) -> None:
    """Keep the weights that a module has before its first training, in the module
    itself. If it has been trained before, restore them with `reset`, or print a line:
    in a loop over folds, its weights have seen the test samples of the later ones.

    continues: The weights come from a checkpoint.
    """
    begun = vars(module).setdefault(BEGUN, copy.deepcopy(module.state_dict()))
    if reset:
        module.load_state_dict(begun)
        if isinstance(module, BaseModule):
            module.has_weights = False  # of the file that it may begin with
    with contextlib.suppress(RuntimeError):  # raised if the module has no Trainer
        recorder = recorder_of(module.trainer)
        if recorder.has_started and not (reset or continues):
            where = "a fast_dev_run"
            if recorder.folder:
                where = relative_to_cwd(recorder.folder)
            say(
                f"{type(module).__name__} has been trained already, in {where}: its "
                "weights go on; reset=True, or a new object, begins anew"
            )


def of_objects(module: Any, parts: Values, flags: Values) -> Any:
    """Return the record of a run of objects, and its data.

    parts: "train" is a data module, or samples as "val" and "test" are.
    """
    data: Any = parts.get("train")
    is_wrong = not isinstance(module, LightningModule) or data is None
    if is_wrong or isinstance(data, type):
        raise UserError(
            "lightbase.train takes a LightningModule and its data, as objects", status=2
        )
    if isinstance(data, DataLoader):
        data = loader_data(parts)
    config = {"model": class_config(module)}
    arrays: Values = {}
    if isinstance(data, LightningDataModule):
        config["data"] = class_config(data)
    else:
        arrays = {"data": class_config(ArrayData()) | {"init_args": {}}}
        names = {*parser_of(arrays["data"]["class_path"]).get_defaults().keys()}
        flags = {f"data.{x}" if x in names else x: flags[x] for x in flags}
    ignored = [x for x in flags if x.partition(".")[0] in config and "." in x]
    if ignored:
        raise UserError(
            f"{ignored[0]} has no effect: this part of the run is an object",
            "give the value where you build the object",
            2,
        )
    args, objects = as_arguments({"name": type(module).__name__, **flags})
    line = CommandLine(args)
    restart = find_restart(line)
    if restart:
        spec = resumed_spec(restart, line, config)
    else:
        spec = read_spec([arrays | config], line, None, is_complete=True)
    begin(spec, spec.config)
    if arrays:
        data = instantiate(spec, Namespace(data=spec.config.data)).data
        data.parts |= parts
    settings = Namespace(trainer=spec.config.trainer.clone())
    settings.trainer.logger = None  # needs the folder of the run
    spec.trainer = vars(instantiate(spec, settings).trainer) | objects
    say("Scripts cannot open a run of objects; lightbase.load(path, module, data) does")
    if restart:
        load_restart(restart, spec, module, data)
    return spec, data


def class_config(value: object) -> Values:
    """Return the config of a Python object: only its class."""
    return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}"}


def as_arguments(settings: Values) -> tuple[list[str], Values]:
    """Return (arguments of a command line, objects). A value that JSON can hold becomes
    an argument such as "--model.lr=0.01", and so does a tensor or an array. Other
    values, such as callbacks, are returned by the names of the Trainer's arguments.

    settings: The values by the names of flags, or of arguments of Lightning's Trainer.
    """
    trainer_arguments = inspect.signature(Trainer).parameters
    args: list[str] = []
    objects: Values = {}
    for name, value in settings.items():
        flag = name
        if name in trainer_arguments:
            flag = f"trainer.{name}"
        text = value
        if not isinstance(value, str | Path):
            try:
                text = json.dumps(value, default=methodcaller("tolist"))
            except (AttributeError, TypeError):
                objects[name.removeprefix("trainer.")] = value
                continue
        args.append(f"--{flag}={text}")
    return args, objects


CONFUSION = "confusion_matrix"


def evaluated(run: Any, split: str, picture: str = "") -> PredictionFigures:
    """Test a run, or validate it. Return the callback that has the predictions and the
    pictures. One of them has to have a name with `picture`."""
    kept = PredictionFigures(every_n_epochs=1)
    with python_errors():
        trainer, module, kept.data = open_run(run, [RunFolder(None), kept])
        evaluate = {"test": trainer.test, "val": trainer.validate}[split]
        evaluate(module, kept.data, verbose=False)
        if not any(picture in name for name in kept.figures):
            raise UserError(
                f"{type(module).__name__} has no picture {picture} of split {split}",
                "the data may have no such samples; docs/tensorboard.md has the tasks",
            )
    return kept


def pictures(run: Any, split: str = "test") -> dict[str, Figure]:
    """Return the pictures that TensorBoard shows of a test or validation, by name.
    "predictions" of images has the worst mistakes first.

    run: See `lightbase.predict`.
    split: "test" or "val".
    """
    return evaluated(run, split).figures


def confusion_matrix(run: Any, split: str = "test") -> Figure:
    """Draw how often each class is predicted as which class. See `pictures`."""
    return evaluated(run, split, CONFUSION).figures[CONFUSION]


def mistakes(run: Any, split: str = "test") -> Tensor:
    """Return the positions of the samples whose class is predicted wrong, int64 (M,),
    the surest mistake first. See `pictures`."""
    kept = evaluated(run, split, CONFUSION)
    true, predicted, shares = kept.columns
    # the loss ignores classes below 0
    is_wrong = (true != predicted) & (true >= 0)
    order = shares[is_wrong].argsort(descending=True)
    return kept.indices[is_wrong][order]
