"""Which run a command goes on with: its folder, its checkpoint, and its own config, on top of which
flags count."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lightning import LightningModule

from lightbase.cli.config import LOOKS_ON
from lightbase.cli.parser import arguments
from lightbase.cli.script import ScriptParser
from lightbase.cli.trust import Trust
from lightbase.devices.devices import num_processes_started
from lightbase.errors import UserError
from lightbase.folder import PLACE, PROJECT, flatten, folder_to_continue, root_of, versions
from lightbase.module import BaseModule
from lightbase.ranks import say
from lightbase.resume.checkpoints import read_checkpoint

# What a resume may change. Of the Trainer: the length, the machine, and what only watches.
TRAINER = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"),
    *("accelerator", "benchmark", "deterministic", "devices", "num_nodes", "precision", "strategy"),
    *(
        "callbacks",
        "detect_anomaly",
        "enable_model_summary",
        "enable_progress_bar",
        "limit_test_batches",
    ),
    *("log_every_n_steps", "logger", "num_sanity_val_steps", "profiler"),
)
SHARES = ("devices", "num_nodes")  # the batches of an epoch: not within one
MODEL = ("channels_last", "compile_mode", "compile_net", "per_class", "test_views", "top_k")
RUN = (
    *(
        "device_monitor",
        "figures_every_n_epochs",
        "gradient_norm",
        "histograms_every_n_epochs",
        "keep_every_epoch",
    ),
    *("num_threads", "patience", "step_timer", "steps_per_execution", "stop_on_nan", "try_network"),
)


class Restart(NamedTuple):
    """own: the run's config, None where it was killed before it wrote one down.
    path, checkpoint: None where it was killed before its first checkpoint: it starts again.
    folder: where it goes on; None starts a new run from the checkpoint.
    place: what today's command says of name and root.
    trust: what the config may construct; None: anything, where the run is the user's own.
    """

    own: dict[str, Any] | None
    path: Path | None = None
    checkpoint: dict[str, Any] | None = None
    folder: Path | None = None
    place: tuple[str, str | None] = ("", None)
    trust: Trust | None = None

    @property
    def start(self) -> dict[str, Any] | None:
        """The config to start from."""
        if self.own is None:
            return None
        name, root = self.place
        trainer = self.own["trainer"] | {"default_root_dir": root}
        if num_processes_started() != (0, 0):  # today's
            trainer |= {"devices": "auto", "num_nodes": 1, "strategy": "auto"}
        return self.own | {
            "ckpt_path": str(self.path or self.folder),
            "name": name,
            "trainer": trainer,
        }


def find_restart(
    ordered: Sequence[str],
    default_name: str | None = None,
    first_flags: Sequence[str] | None = None,
) -> tuple[Restart | None, list[str]]:
    """What --ckpt_path of a command line asks for, None without one; and the arguments but for the
    --config files.

    ordered: as from `arguments`. default_name: of runs of this command, where it has none; the
    model's class unless given. first_flags: of a run that was not begun by this user's commands
    alone, what the user has typed for it. Raises UserError where there is no such run, or its
    checkpoint is not sound.
    """
    flags = [arg for arg in ordered[1:] if not arg.startswith("--config=")]
    given: dict[str, Any] = {"model": ordered[0]}
    for file in config_files(ordered):
        given |= flatten(yaml.safe_load(file.read_text(encoding="utf-8")))
    order = ScriptParser(add_help=False)
    order.add_argument("--trust_checkpoint", nargs="?", const="true")
    for key in ("ckpt_path", "name", "trainer.default_root_dir"):
        order.add_argument(f"--{key}")
    given |= {
        key: value
        for key, value in vars(order.parse_known_args(flags)[0]).items()
        if value is not None
    }
    asked, name, root = (
        given.get(key) for key in ("ckpt_path", "name", "trainer.default_root_dir")
    )
    if asked in (None, "null") or any(flag.startswith("--print_config") for flag in flags):
        return None, flags
    if asked in ("last", "best"):
        name = name or default_name or str(given["model"]).rpartition(".")[2]
        restart = newest(str(asked), Path(root or PROJECT.logs), str(name))
        trust = (
            None
            if first_flags is None
            else Trust(restart.path or Path(str(restart.folder)), arguments(first_flags))
        )
        return restart._replace(place=(str(name), root), trust=trust), flags
    path = Path(str(asked))
    checkpoint = read_checkpoint(path)
    own = checkpoint["config"]
    place = str(name or own["name"]), root or root_of(path, str(own["name"]))
    folder = folder_to_continue(path, Path(place[1] or PROJECT.logs), place[0])
    is_trusted = str(given.get("trust_checkpoint")).lower() == "true"
    trust = None if is_trusted else Trust(path, ordered)
    return Restart(own, path, checkpoint, folder, place, trust), flags


def config_files(ordered: Sequence[str]) -> list[Path]:
    return [Path(arg.removeprefix("--config=")) for arg in ordered if arg.startswith("--config=")]


def newest(which: str, root: Path, name: str) -> Restart:
    """The newest run of a name: `last` goes on in it, or starts it again if it was killed before
    its first checkpoint; `best` starts a new run from it."""
    folders = list(reversed(versions(root / name).values()))
    if which == "best":  # not one that was killed before it had a config
        folders = [folder for folder in folders if (folder / "config.yaml").is_file()]
    if not folders:
        raise UserError(
            f"ckpt_path {which}: no run in {root / name} has one; leave --ckpt_path out to "
            "start a run"
        )
    folder, path, *older = (
        folders[0],
        *(folder / "checkpoints" / f"{which}.ckpt" for folder in folders),
    )
    if path.is_file():
        checkpoint = read_checkpoint(path)
        return Restart(checkpoint["config"], path, checkpoint, folder if which == "last" else None)
    if which == "last" and not (folder / "metrics.json").exists():
        say(f"{folder} was stopped before its first checkpoint: it starts again")
        file = folder / "config.yaml"
        return Restart(
            yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None,
            folder=folder,
        )
    found = [
        f"; {path} is older: give that path, or leave --ckpt_path out"
        for path in older
        if path.is_file()
    ]
    raise UserError(
        f"ckpt_path {which}: the newest run {folder} has no {path.name}{''.join(found[:1])}"
    )


def check_changes(
    restart: Restart, model: LightningModule, now: dict[str, Any], flags: Sequence[str]
) -> list[str]:
    """Print, and return, the settings that a resume changes. Raises UserError for one that it may
    not change.

    now: the config that flags have made of the run's own.
    """
    differences = changed(restart.own or {}, now, flags)
    for key, (before, value) in differences.items():
        if restart.checkpoint is not None and not may_change(
            key, is_within_epoch(restart.checkpoint)
        ):
            has_weights = isinstance(model, BaseModule) and "weights" in now["model"].get(
                "init_args", {}
            )
            weights = f" and with --model.weights {restart.path}" if has_weights else ""
            way_out = f"leave it out, or start a new run: without --ckpt_path{weights}"
            raise UserError(
                f"--{key} {short(value)}: a resume goes on with {short(before)}\n{way_out}", 2
            )
        say(f"Resume: {key} {short(value)}, before {short(before)}")
    return list(differences)


def may_change(key: str, in_epoch: bool) -> bool:
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if in_epoch and section == "trainer" and name in SHARES:
        return False
    return key in RUN or name in {"trainer": TRAINER, "data": LOOKS_ON, "model": MODEL}.get(
        section, ()
    )


def is_within_epoch(checkpoint: dict[str, Any]) -> bool:
    epochs = (
        checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current")
    )
    return epochs is not None and epochs["ready"] > epochs["processed"]


def changed(
    before: dict[str, Any], now: dict[str, Any], flags: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Values by flag, those before and those now; of what only one of the two has, what `flags`
    name."""
    was, flat = flatten(before), flatten(now)
    given = {flag.partition("=")[0].removeprefix("--") for flag in flags}
    parents = {
        key: {key, *(key[:i] for i, letter in enumerate(key) if letter == ".")}
        for key in flat | was
    }
    names = [key for key, names in parents.items() if (key in was and key in flat) or names & given]
    return {
        key: (was.get(key), flat.get(key))
        for key in names
        if key not in PLACE and was.get(key) != flat.get(key)
    }


def say_unused(files: dict[str, Any], now: dict[str, Any], changes: Iterable[str]) -> None:
    """Name what config files say otherwise than the run, which goes on with its own."""
    flat = flatten(now)
    for key, value in flatten(files).items():
        is_path = isinstance(value, str) and str(Path(value).absolute()) == flat.get(key)
        if (
            key in flat
            and key not in (*PLACE, *changes)
            and not agrees(value, flat[key])
            and not is_path
        ):
            say(
                f"Resume: {key} stays {short(flat[key])}; the config file's {short(value)} "
                "counts as a flag only"
            )


def short(value: Any) -> str:
    return textwrap.shorten(str(value), 80)


def agrees(said: Any, now: Any) -> bool:
    """Whether `now` is what was said, with more in its dicts at most: a callback's other arguments,
    for instance."""
    if isinstance(said, dict) and isinstance(now, dict):
        return all(key in now and agrees(said[key], now[key]) for key in said)
    if isinstance(said, list) and isinstance(now, list):
        return len(said) == len(now) and all(map(agrees, said, now))
    return bool(said == now)
