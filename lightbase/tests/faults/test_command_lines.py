"""Command lines and configs with whatever a person could type: a run, or an error of
two lines, and nothing else.

FAULT_EXAMPLES=1000 pytest -m slow lightbase/tests/faults/test_command_lines.py   # other ones
each time
"""

import contextlib
import io
import os
import re
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from paths import TINY

from lightbase.commands.train import main

NUM_EXAMPLES = int(os.environ.get("FAULT_EXAMPLES", 25))
SECONDS = 60  # more for one example is a hang
BASE: dict[str, Any] = yaml.safe_load(Path(TINY).read_text())
BASE["trainer"] |= {"max_epochs": 1, "log_every_n_steps": 2}
BASE["data"]["init_args"] |= {"num_train": 96, "num_test": 24}


def texts(joined: str) -> tuple[str, ...]:
    return tuple(joined.split("|"))


class Values(NamedTuple):
    """What a person may type for a flag.

    possible: alone, each makes a run. impossible: each is refused, whatever else is
    typed. others: it depends.
    """

    possible: tuple[str, ...]
    impossible: tuple[str, ...]
    others: tuple[str, ...] = ()

    def but(
        self,
        *possible: str,
        impossible: tuple[str, ...] = (),
        others: tuple[str, ...] = (),
    ) -> "Values":
        """The same with more values; what was impossible for the kind may be possible
        here."""
        kept = tuple(
            value for value in self.impossible if value not in (*possible, *others)
        )
        return Values(
            (*self.possible, *possible), (*kept, *impossible), (*self.others, *others)
        )


WORDS = texts("abc|fünf|日本|1,5|1 2|[1]|[]|{a: 1}|{}|1e|--1|'|[1|a: b: c|%")
NOT_A_NUMBER = (
    *WORDS,
    *texts("null|| |nan|.nan|true|inf|-inf|.inf|1e400|-1|-0.5|-1e9"),
)
COUNT = Values(
    ("1", "2"),
    (*NOT_A_NUMBER, "0", "2.5", "1e-3", "0.0"),
    ("02", "1.0", "0x2", "1e0", "٢", "1_"),
)
COUNT_OR_0 = COUNT.but("0", others=("0.0",))
POSITIVE = Values(
    ("0.01", "1e-3", "1", ".5"),
    (*NOT_A_NUMBER, "0", "0.0", "1e-400"),
    ("1e30", "1e-30", "100", "1_0"),
)
POSITIVE_OR_0 = POSITIVE.but("0", "0.0", others=("1e-400",))
SHARE = POSITIVE_OR_0.but(impossible=("1", "1.0", "5", "1e30", "100")).but(
    others=("0.01", "1e-3", "1e-30")
)
SHARE = SHARE._replace(
    possible=("0.2", ".5"),
    others=("0.01", "1e-3", "1e-30", "0", "0.0", "1e-400", "0.99"),
)
SWITCH = Values(
    ("true", "false"),
    (*(word for word in NOT_A_NUMBER if word != "true"), "2", "0.5", "tru", "ja"),
    ("True", "FALSE", "yes", "no", "on", "off", "1", "0"),
)


def optional(values: Values) -> Values:
    """In a config, a blank value is null."""
    return values.but("null", others=("", " "))


KINDS = {
    "-": Values((), ()),
    "NUMBER": Values((), NOT_A_NUMBER),
    "NAME": Values((), texts("abc|fünf|日本|[1]|{a: 1}|1|-1|1e400|[1|a: b: c|%|")),
    "COUNT": COUNT,
    "COUNT?": optional(COUNT),
    "POSITIVE": POSITIVE,
    "POSITIVE_OR_0": POSITIVE_OR_0,
    "POSITIVE_OR_0?": optional(POSITIVE_OR_0),
    "SHARE": SHARE,
    "SWITCH": SWITCH,
}
# flag ; kind of its values ; more that are possible ; more that are impossible ; others
TABLE = """\
name ; - ; x|über uns|a/b ; ../x|/tmp/x|.. ; |%d|null|1|nan|[1]|.|a b
monitor ; - ; val/acc|val/loss|null|auto ; val/f1|acc|val|日本 ; |1|nan
patience ; COUNT? ; 1000000
ckpt_path ; - ; null ; last|best|nowhere.ckpt|/|.|日本|1 ; |[1]|nan
model ; NAME ; example.classifier.Classifier ; example.clasifier.Classifier|Clasifier|\
torch.nn.Linear|os.system|null|nan|5 ; example.regressor.Regressor|Classifier|Regressor
model.lr ; POSITIVE ; 0.5
model.optimizer ; NAME ; SGD|AdamW|RMSprop|torch.optim.Adagrad ; Addam|sgd|Optimizer|\
torch.optim.Optimiser|torch.nn.Linear|null|nan|torch. ; LBFGS|SparseAdam|Adafactor|Muon
model.optimizer_args.weight_decay ; - ; 0|0.1 ; -1|abc|[1]|nan ; null||inf|1e400
model.scheduler ; NAME ; CosineAnnealingLR|WarmupCosineLR|FinalDecayLR|ReduceLROnPlateau|\
null ; CosineAnealingLR|cosine|LRScheduler|torch.optim.SGD|true|nan ; StepLR|OneCycleLR|CyclicLR|\
LambdaLR|MultiStepLR|SequentialLR
model.scheduler_args ; - ; {}|null ; [1]|5|abc ; {warmup_steps: 3}|{eta_min: 0.1}|
model.compile_net ; NAME ; null|eager ; inducter|true|nan
model.net ; NAME ; example.models.mlp.MLP ; example.models.mlp.MPL|MLPP|example.model.mlp.MLP|\
torch.nn|os.getcwd|null ; torch.nn.Linear|torch.nn.Identity|torchvision.models.resnet18|MLP
model.net.sizes ; - ; [192,4]|[192,8,8,4]|[192, 1, 4] ; [192]|[]|192|[0,4]|[-1]|[192,x]|null|\
[192,4.5]|[191,4]|[192,3]|[192,5]|abc|{a: 1}|[192
model.criterion ; NAME ; torch.nn.CrossEntropyLoss ; torch.nn.CrossEntropy|CrossEntropyLos|\
torch.nn.functional.mse|5 ; torch.nn.NLLLoss|torch.nn.MultiMarginLoss|null
data ; NAME ; example.data.synthetic.SyntheticImages ; example.data.synthetic.SynteticImages|\
torch.nn.Linear|os.system|nan|5 ; SyntheticImages
data.data_dir ; - ; x|null|über uns|/nowhere/at/all ;  ; |.|1|[1]|nan
data.batch_size ; COUNT ; 16|86 ; 87|1000000|999999999999999999999999999999
data.num_workers ; NUMBER ; 0 ; 2.5|1e-3 ; 0.0|false
data.val_fraction ; SHARE
data.noise ; POSITIVE_OR_0
trainer.accelerator ; NAME ; cpu|auto ; cpuu|CPU|nan|null ; gpu|mps|tpu
trainer.strategy ; NAME ; auto ; dpp|null|nan ; dp|single_device|fsdp|deepspeed
trainer.devices ; - ; 1|auto ; 0|abc|-5|[5]|nan|null|2.5|{a: 1}|日本 ; -1|[0]|"1"
trainer.precision ; NAME ; 32-true|64-true|32|64|null ; 17|8|fp16|32-tru|nan|true ; bf16-mixed|\
16-mixed|bf16-true|16-true|transformer-engine
trainer.logger ; - ; true|null|false ; abc|5|TensorBoardLoger|nan ; []||CSVLogger
trainer.callbacks ; - ; null|[]|ModelSummary|\
lightning.pytorch.callbacks.LearningRateMonitor ; abc|5|EarlyStoping|torch.nn.Linear|\
EarlyStopping|nan ; {}||StochasticWeightAveraging|GradientAccumulationScheduler
trainer.fast_dev_run ; SWITCH ; 2|1|0 ;  ; null
trainer.max_epochs ; - ; 1|2 ; abc|2.5|nan|inf|1e400|[1]|-2|-5|日本|1,5|[1 ; 0|02|1_
trainer.max_steps ; COUNT ; 0|5|1000000|-1 ;  ; 0.0
trainer.overfit_batches ; - ; 1|0 ; -1|1.5|abc|[1]|null|nan|inf ; 0.5|1000
trainer.val_check_interval ; - ; 2|0.5|1.0|null ; -1|abc|[1]|1.5|nan|1000|0 ; 00:00:00:01
trainer.accumulate_grad_batches ; COUNT ; 1000
trainer.gradient_clip_val ; POSITIVE_OR_0?
"""


def flag_with_values(row: str) -> tuple[str, Values]:
    flag, kind, *columns = (column.strip() for column in row.split(" ;"))
    lists = [texts(column) if column else () for column in columns]
    possible, impossible, others = [*lists, (), (), ()][:3]
    return flag, KINDS[kind].but(*possible, impossible=impossible, others=others)


FLAGS = dict(map(flag_with_values, TABLE.splitlines()))
SWITCHES = (
    "try_network|stop_on_nan|device_monitor|step_timer|keep_every_epoch|model.channels_last|"
    "data.persistent_workers|data.drop_last|trainer.inference_mode|"
    "trainer.use_distributed_sampler|trainer.detect_anomaly|trainer.sync_batchnorm"
)
OPTIONAL_SWITCHES = (
    "data.resident|data.pin_memory|trainer.enable_checkpointing|trainer.enable_progress_bar|"
    "trainer.enable_model_summary|trainer.benchmark"
)
COUNTS = (
    "figures_every_n_epochs|data.split_seed|trainer.reload_dataloaders_every_n_epochs"
)
LIMIT = Values(
    ("1", "1.0", "null", "0", "1000"),
    texts("-1|1.5|abc|-0.5|[1]|nan|inf|1e400"),
    ("0.5",),
)
FLAGS |= dict.fromkeys(texts(SWITCHES), SWITCH)
FLAGS |= dict.fromkeys(texts(OPTIONAL_SWITCHES), optional(SWITCH))
FLAGS |= dict.fromkeys(texts(COUNTS), COUNT_OR_0)
FLAGS |= dict.fromkeys(
    ("trainer.min_epochs", "trainer.min_steps"), optional(COUNT_OR_0)
)
FLAGS |= dict.fromkeys(
    ("trainer.limit_val_batches", "trainer.limit_test_batches"), LIMIT
)
POSSIBLE, IMPOSSIBLE, OTHERS = Values._fields
Setting = tuple[str, str, str]  # flag, value, label


@st.composite
def setting(draw: st.DrawFn, *labels: str) -> Setting:
    flag = draw(st.sampled_from(sorted(FLAGS)))
    pairs = [
        (value, label) for label in labels for value in getattr(FLAGS[flag], label)
    ]
    value, label = draw(
        st.sampled_from(pairs or [(FLAGS[flag].impossible[0], IMPOSSIBLE)])
    )
    return flag, value, label


def several(*kinds: st.SearchStrategy[Setting]) -> st.SearchStrategy[list[Setting]]:
    return st.lists(
        st.one_of(*kinds), min_size=1, max_size=4, unique_by=lambda found: found[0]
    )


ANYTHING = several(setting(*Values._fields))
# half of them are mostly runs: one wrong value would end the others before much has
# happened
SETTINGS = st.one_of(ANYTHING, several(setting(POSSIBLE), setting(POSSIBLE, OTHERS)))


class Hang(BaseException):
    """More than SECONDS."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(args: list[str], root: Path, labels: list[str]) -> None:
    """Run a command line; raises AssertionError, or what the run raises, where it is
    not as it must be."""
    out, err, status = io.StringIO(), io.StringIO(), None
    try:
        with (
            time_limit(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            main([*args, "--trainer.default_root_dir", str(root)])
    except SystemExit as ended:
        status = ended.code
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
    error = err.getvalue()
    kept = [folder for folder in root.rglob("version_*") if folder.is_dir()]
    if status is None:
        assert IMPOSSIBLE not in labels, "accepted"
        assert "Traceback" not in error
        return
    assert status in (1, 2), status
    assert error.startswith("error: "), error
    assert len(error.strip().splitlines()) <= 2, error
    assert "Traceback" not in error
    assert labels != [POSSIBLE], error
    if status == 2:
        assert not kept
    for folder in kept:  # stopped in training, where what was saved is kept
        assert list(folder.glob("checkpoints/*.ckpt")), f"{folder} is left"


def of_command(settings: list[Setting], root: Path) -> list[str]:
    config = root / "base.yaml"
    config.write_text(yaml.safe_dump(BASE))
    return [
        "--config",
        str(config),
        *(f"--{flag}={value}" for flag, value, _ in settings),
    ]


def of_yaml(settings: list[Setting], root: Path) -> list[str]:
    """The same in a config: each value as it is typed, behind its key."""
    config = yaml.safe_load(yaml.safe_dump(BASE))
    for index, (flag, _, _) in enumerate(settings):
        inner, (*parents, name) = config, flag.split(".")
        for key in parents:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                reject()  # a value, and one below it
            if "class_path" in inner and key != "net":
                inner = inner.setdefault("init_args", {})
            elif key == "net" and "init_args" in inner:
                inner = inner["init_args"]
        if flag == "model":
            config["model"] = {"init_args": inner[name]}
        if flag == "model" or (
            isinstance(inner.get(name), dict) and "class_path" in inner[name]
        ):
            inner, name = inner[name], "class_path"
        inner[name] = f"@{index}@"
    text = yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
    for index, (_, value, _) in enumerate(settings):
        text = re.sub(rf"'@{index}@'|@{index}@", lambda _, value=value: value, text)
    path = root / "typed.yaml"
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


@pytest.mark.slow
@pytest.mark.parametrize("write", [of_command, of_yaml])
@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize="FAULT_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(values=SETTINGS)
def test_what_is_typed_is_a_run_or_two_lines(write: Any, values: list[Setting]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(
            write(values, Path(folder)), Path(folder), [label for *_, label in values]
        )
