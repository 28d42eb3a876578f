"""What the config in a checkpoint may construct. Constructing a class runs code, so a file may not
name just any."""

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sysconfig
import tomllib
import typing
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace, set_parsing_settings
from torch import nn

from lightbase.compat import import_rules, restore_import_rules
from lightbase.errors import IMPORT_PATH, UserError
from lightbase.folder import PROJECT
from lightbase.resume.checkpoints import PATHS

LOGGERS = "lightning.pytorch.loggers"
PACKAGES = (
    "lightbase",  # its functions import, read and write what their arguments name
    "lightning.pytorch.callbacks",
    LOGGERS,
    "timm",
    "torch.nn",
    "torch.optim",
    "torchmetrics",
    "torchvision",
)
"""Their classes may be constructed."""
NATIVE = "torch._C._nn"  # where some functions of torch.nn.functional are defined, such as gelu
EXCEPT = (
    "lightbase.cli",
    "lightbase.devices",
    "lightbase.folder",  # makes folders
    "lightbase.resume",
    "lightbase.run",
    "lightbase.tools",
    "timm.models._features_fx",  # generates code
    "timm.data",  # reads and writes files that its arguments name
    "timm.task",  # loads a teacher from a file
    "timm.utils",  # writes checkpoints
    "torchmetrics.functional",  # networks that load a file
    "torchvision.datasets",  # unpacks archives, makes folders, unpickles a file
    "scripts",
    "tests",  # starts programs
    "torchvision.io",  # reads files
    "torchvision.models._api",  # downloads weights from any address
    "torchvision.models.feature_extraction",  # generates code
)
"""Nothing of these modules."""
ARGUMENTS = {
    "timm": ("cache_dir", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"),
    "torchmetrics": (
        "baseline_path",
        "baseline_url",
        "feature_extractor_weights_path",
        "model_name_or_path",
    ),
    "lightning.pytorch.callbacks": ("dirpath", "exclude_batches_path"),
    LOGGERS: (
        *(
            "artifact_location",
            "dict_kwargs",
            "dir",
            "log_dir",
            "name",
            "root_dir",
            "save_dir",
            "sub_dir",
        ),
        *("tracking_uri", "version"),
    ),
}
"""Not with these arguments, by package: files to load and places to write to."""
ALLOWED = (
    "classes of torch.nn, torch.optim, torchvision, torchmetrics, timm and Lightning's "
    "callbacks and loggers, "
    "networks of torchvision.models and timm, and your own code"
)
WAY_OUT = (
    "if you trust the file: --trust_checkpoint true, or its package in trusted_packages "
    "in pyproject.toml"
)
NAMING = ("--model", "--data", "--trainer", "--config")  # flags whose values may name classes
PLACES = ("dir", "path")  # the ends of those that do not
FIELD = re.compile(r"\{[\w-]+(/[\w-]+)*(:\d*(\.\d+)?[defg])?\}")  # of a checkpoint's file name
NAMED = (
    *PATHS,
    "accelerator",
    "plugins",
    "profiler",
    "strategy",
)  # arguments whose text may be an import path


class Trust:
    """Decides what a config that comes from a file may construct.

    Allowed are classes of PACKAGES, the functions of torchvision.models and timm that make
    networks, and the user's: code in this repository and the working folder, `trusted_packages` of
    pyproject.toml, and what the user has typed.

    file: The checkpoint, or the folder of the run. Code beside it came with it, and is not the
    user's. args: The command line. What it and its --config=FILE name is the user's.
    """

    def __init__(self, file: Path, args: Sequence[str]) -> None:
        self.file = file
        self.typed = {text for value in typed_values(args) for text in strings(value)}

    @cached_property
    def modules(self) -> set[str]:
        """The user's modules and packages, with all that lies below them."""
        # transforms are functions
        return {PROJECT.package, "lightbase.data.transforms", *trusted_packages()}

    @cached_property
    def named(self) -> set[str]:
        """Import paths that the user has typed, and those of their definitions."""
        typed = {
            text for text in self.typed if IMPORT_PATH.fullmatch(text) and not Path(text).exists()
        }
        return typed | {defined_at(resolve(path)) for path in typed}

    @contextlib.contextmanager
    def enforced(self, config: Any) -> Iterator[None]:
        """While jsonargparse works on `config`, it imports only what is allowed. Raises UserError
        for anything else."""
        names = {text.partition(".")[0] for text in strings(config) if IMPORT_PATH.fullmatch(text)}
        self.modules.update(
            name for name in names if name not in EXCEPT and is_users_module(name, self.file)
        )
        before = import_rules()
        paths = (*PACKAGES, NATIVE, *self.modules, *self.named)
        allowed = [path for path in paths if all(map(str.isidentifier, path.split(".")))]
        set_parsing_settings(import_path_denylist=["*", *EXCEPT], import_path_allowlist=allowed)
        try:
            yield
        except (UserError, ImportError, ValueError) as error:
            if denied := re.search(
                r"Importing '([\w.]+)' is not allowed", f"{error} {error.__cause__}"
            ):
                self.refuse(denied[1])
            raise
        finally:
            restore_import_rules(before)

    def check(self, config: Any, key: str = "") -> None:
        """Raise UserError where a parsed config would construct or call what it may not."""
        if isinstance(config, list | tuple | set):
            for value in config:
                self.check(value, key)
        elif isinstance(config, dict | Namespace):
            entries = dict(vars(config) if isinstance(config, Namespace) else config)
            if isinstance(config, Namespace) and "class_path" in entries:
                self.check_class_path(str(entries["class_path"]), entries)
            for name, value in entries.items():
                self.check(value, str(name))
        elif inspect.isroutine(config) or inspect.isclass(config):
            self.check_object(config, defined_at(config))
        elif key in NAMED and IMPORT_PATH.fullmatch(
            str(config)
        ):  # the model or Lightning imports it
            self.check_object(self.imported(config), config)

    def check_class_path(self, path: str, entries: dict[str, Any]) -> None:
        made = self.imported(path)
        self.check_object(made, path)
        if inspect.isroutine(made) and not (
            makes_network(made) or returns_network(made) or path in self.typed
        ):
            self.refuse(path)
        self.check_arguments(defined_at(made), entries)

    def imported(self, path: str) -> Any:
        if not self.allows(path, is_class=True):
            self.refuse(path)
        return resolve(path)

    def check_object(self, value: Any, path: str) -> None:
        is_function = makes_network(value) or is_functional(value)
        if not self.allows(defined_at(value), inspect.isclass(value)) and not is_function:
            self.refuse(path)

    def check_run(self, checkpoint: dict[str, Any], folder: Path | None) -> None:
        """Raise UserError where a resume would delete or write something outside the run's folder:
        by a path in the state of a callback, whose older files Lightning deletes, or by a link in
        the folder."""
        for path in [
            *strings(checkpoint.get("callbacks", {})),
            *keys(checkpoint.get("callbacks", {})),
        ]:
            if "://" in path or ".." in Path(path).parts:
                what = f"the state of a callback in {self.file} has the path {path[:60]!r}"
                raise UserError(f"{what}, which leads out of the run's folder\n{WAY_OUT}", 2)
        for file in folder.rglob("*") if folder else ():
            if file.is_symlink():
                what = (
                    f"{file} is a link: the resume of a run from somebody else would write "
                    "where it leads"
                )
                raise UserError(f"{what}\n{WAY_OUT}", 2)

    def allows(self, path: str, is_class: bool) -> bool:
        """What the nearest rule for an import path says: one about a module holds for all that lies
        below it."""
        parts = path.split(".")
        for parent in (".".join(parts[:num]) for num in range(len(parts), 0, -1)):
            if parent in self.modules or parent in self.named:
                return True
            if parent in EXCEPT:
                return False
            if parent in PACKAGES:
                return is_class
        return False

    def check_arguments(self, place: str, entries: dict[str, Any]) -> None:
        if is_below(place, *self.modules):
            return
        refused = [
            name
            for package, names in ARGUMENTS.items()
            if is_below(place, package)
            for name in names
        ]
        given = {**as_dict(entries.get("init_args")), **as_dict(entries.get("dict_kwargs"))}
        for name, value in {**given, "dict_kwargs": entries.get("dict_kwargs")}.items():
            # Lightning's join a name to a folder; timm takes hf-hub:NAME and local-dir:FOLDER for a
            # model's name
            leads_out = (
                is_below(place, "lightning")
                and isinstance(value, str)
                and leads_out_of_folder(value)
            )
            leads_out |= is_below(place, "timm") and name == "model_name" and ":" in str(value)
            if value and (name in refused or leads_out) and str(value) not in self.typed:
                self.refuse(f"{place} with {name} {str(value)[:60]!r}")

    def refuse(self, what: str) -> None:
        raise UserError(f"{self.file} names {what}; a file may only name {ALLOWED}\n{WAY_OUT}", 2)


def makes_network(function: Any) -> bool:
    """Whether it is one of the functions by which torchvision and timm make their networks."""
    place = defined_at(function)
    if place.startswith("torchvision.models."):
        models: Any = importlib.import_module("torchvision.models")
        return any(models.get_model_builder(name) is function for name in models.list_models())
    if place.startswith("timm.models."):
        timm: Any = importlib.import_module("timm")
        return function is timm.create_model or timm.is_model(function.__name__)
    return False


def is_functional(function: Any) -> bool:
    """Whether it is one of torch.nn.functional, which compute tensors from tensors: an activation,
    for instance."""
    found = vars(nn.functional).get(getattr(function, "__name__", ""))
    return found is function and is_below(defined_at(function), nn.functional.__name__, NATIVE)


def returns_network(function: Any) -> bool:
    """Whether its annotations say so."""
    try:
        returned = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


def trusted_packages() -> list[str]:
    """Of pyproject.toml. Raises UserError where that is not a list of import paths."""
    file = PROJECT.root / "pyproject.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file} is no valid TOML: {error}", 2) from error
    packages = content.get("tool", {}).get("lightbase", {}).get("trusted_packages", [])
    if not isinstance(packages, list) or not all(
        isinstance(name, str) and name for name in packages
    ):
        raise UserError(f"{file}: trusted_packages {packages!r} must be a list of names", 2)
    return packages


def is_users_module(name: str, beside: Path) -> bool:
    """Whether the module lies in this repository or the working folder, and is neither an installed
    package nor a folder that holds the file `beside`."""
    try:
        spec = importlib.util.find_spec(name)  # imports nothing
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    found = spec.submodule_search_locations or (
        [spec.origin] if spec.has_location and spec.origin else []
    )
    places = [Path(place).resolve() for place in found]
    holds_file = any(
        file.is_relative_to(place)
        for place in places
        for file in (beside.absolute(), beside.resolve())
    )
    return bool(places) and not holds_file and all(map(is_users_file, places))


def is_users_file(path: Path) -> bool:
    is_installed = {"site-packages", "dist-packages"} & {*path.parts}
    is_pythons = path.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())
    is_near = path.is_relative_to(PROJECT.root) or path.is_relative_to(Path.cwd())
    folders = [
        root / name for root in (PROJECT.root, Path.cwd()) for name in ("scripts", "logs", "data")
    ]
    is_no_code = any(path.is_relative_to(folder) for folder in folders)
    return is_near and not (is_installed or is_pythons or is_no_code)


def leads_out_of_folder(path: str) -> bool:
    path = FIELD.sub("", path)
    return Path(path).is_absolute() or ".." in Path(path).parts or bool({*"$~{}"} & {*path})


def resolve(path: str) -> Any:
    """The object at an import path, None where there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def defined_at(value: Any) -> str:
    """The import path of the definition of a class or function, or of an object's class."""
    definition = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return f"{definition.__module__}.{definition.__qualname__}"


def is_below(path: str, *parents: str) -> bool:
    return any(path == parent or path.startswith(f"{parent}.") for parent in parents)


def strings(value: Any) -> Iterator[str]:
    """All texts among the values of nested dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def keys(value: Any) -> Iterator[str]:
    """All texts among the keys of nested dicts."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield str(key)
        yield from keys(inner)


def typed_values(args: Sequence[str]) -> Iterator[Any]:
    """The values of a command line's flags that may name classes, read as YAML, and the contents of
    --config=FILE."""
    flag = ""
    for arg in args:
        if arg.startswith("-"):
            flag, _, arg = arg.partition("=")
        if flag == "--config" and arg:
            arg = Path(arg).read_text(encoding="utf-8")
        if flag.startswith(NAMING) and not flag.endswith(PLACES):
            try:
                yield yaml.safe_load(arg)
            except yaml.YAMLError:
                yield arg


def as_dict(values: Any) -> dict[str, Any]:
    return dict(vars(values) if isinstance(values, Namespace) else values or {})
