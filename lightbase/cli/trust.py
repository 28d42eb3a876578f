"""What the config in a checkpoint may construct. Constructing a class runs code, so a checkpoint
from somebody else may name only classes and functions that are known to do no harm."""

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from torch import nn

from lightbase.cli.command_line import PATHS, CommandLine
from lightbase.cli.config import entries
from lightbase.compat import import_rules
from lightbase.errors import IMPORT_PATH, UserError
from lightbase.folder import PROJECT

PACKAGES = (
    "lightbase",  # not its functions: they import, read and write what their arguments name
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "timm",
    "torch.nn",
    "torch.optim",
    "torchmetrics",
    "torchvision",
)
"""Their classes may be constructed."""
FUNCTIONAL = ("torch.nn.functional", "torch._C._nn")  # the second has gelu and others
"""Their functions may be called: they compute tensors from tensors."""
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
    "torchvision.io",  # reads files
    "torchvision.models._api",  # downloads weights from any address
    "torchvision.models.feature_extraction",  # generates code
)
"""Nothing of these modules may be constructed or called."""
NOT_USERS = ("data", "logs", "scripts", "tests")
"""Folders of the repository whose code no file may name: tests start programs."""
PLACES = re.compile(r"(.+_)?(dir|dirpath|path|url|uri|location|cfg|overlay)|(file)?name|version")
"""Arguments of installed packages that name a file to load, or a place to write to."""
ADDRESS = re.compile(r"/|.*(\.\.|[*$~{}\\]|[A-Za-z]:)", re.DOTALL)
"""A text that leads out of a folder, has a variable, or is an address as timm's hf-hub:NAME."""
ALLOWED = "classes of known packages (docs/reliability.md) and your own code"
WAY_OUT = "if you trust the file: --trust_checkpoint true"
IMPORTED = (*PATHS, "accelerator", "plugins", "profiler", "strategy")
"""Arguments whose text the model or Lightning may import."""


class Trust:
    """Decides what the config in a file may construct.

    Allowed are classes of PACKAGES, the functions of torchvision.models and timm that make
    networks, functions of torch.nn.functional, and the user's code: packages and modules directly
    in this repository or in the working folder, and what the user has typed.

    file: The checkpoint, or the folder of the run. Code beside it came with it, and is not the
    user's.
    command_line: What it and its config files name is the user's.
    """

    def __init__(self, file: Path, command_line: CommandLine) -> None:
        self.file = file
        self.typed = {*strings(command_line.values_that_name_classes())}
        # modules and packages of the user, with all below; transforms of lightbase are functions
        self.modules = {PROJECT.package, "lightbase.data.transforms"}

    @cached_property
    def typed_paths(self) -> set[str]:
        """Import paths that the user has typed, and the paths where these objects are defined."""
        paths = {text for text in self.typed if IMPORT_PATH.fullmatch(text)}
        paths = {path for path in paths if not Path(path).exists()}
        return paths | {defined_at(resolve(path)) for path in paths}

    @contextlib.contextmanager
    def enforced(self, config: Any) -> Iterator[None]:
        """While jsonargparse works on `config`, it imports only what is allowed. Raises UserError
        for anything else."""
        packages = {path.split(".")[0] for path in strings(config) if IMPORT_PATH.fullmatch(path)}
        self.modules.update(
            name for name in packages if name not in NOT_USERS and is_users_module(name, self.file)
        )
        paths = (*PACKAGES, *FUNCTIONAL, *self.modules, *self.typed_paths)
        allowed = [path for path in paths if all(map(str.isidentifier, path.split(".")))]
        try:
            with import_rules(["*", *EXCEPT], allowed):
                yield
        except (UserError, ImportError, ValueError) as error:
            message = f"{error} {error.__cause__}"
            if denied := re.search(r"Importing '([\w.]+)' is not allowed", message):
                self.refuse(denied[1])
            raise

    def check(self, config: Any, key: str = "") -> None:
        """Raise UserError where a parsed config would construct or call what it may not.

        key: the argument that has this value.
        """
        if isinstance(config, list | tuple | set):
            for value in config:
                self.check(value, key)
        elif isinstance(config, dict | Namespace):
            values = entries(config)
            if isinstance(config, Namespace) and "class_path" in values:
                self.check_class_path(str(values["class_path"]), values)
            for name, value in values.items():
                self.check(value, str(name))
        elif inspect.isroutine(config) or inspect.isclass(config):
            self.check_object(config, defined_at(config))
        elif key in IMPORTED and IMPORT_PATH.fullmatch(str(config)):
            self.imported(config)

    def check_class_path(self, path: str, values: dict[str, Any]) -> None:
        made_by = self.imported(path)
        is_function = inspect.isroutine(made_by) and path not in self.typed
        if is_function and not makes_network(made_by) and not returns_network(made_by):
            self.refuse(path)
        self.check_arguments(defined_at(made_by), values)

    def imported(self, path: str) -> Any:
        """The class or function at a path of the config. Raises UserError if it is not allowed."""
        if not self.allows(path, is_class=True):
            self.refuse(path)
        value = resolve(path)
        self.check_object(value, path)
        return value

    def check_object(self, value: Any, path: str) -> None:
        """path: the name in the config, which may be another one than that of the definition."""
        place = defined_at(value)
        if makes_network(value) or is_below(place, *FUNCTIONAL):
            return
        if not self.allows(place, inspect.isclass(value)):
            self.refuse(path)

    def allows(self, path: str, is_class: bool) -> bool:
        """Whether an import path is allowed. A rule about a module holds for all that lies below
        it; the rule nearest to the path counts."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            parent = ".".join(parts[:length])
            if parent in self.modules or parent in self.typed_paths:
                return True
            if parent in EXCEPT:
                return False
            if parent in PACKAGES:
                return is_class
        return False

    def check_arguments(self, place: str, values: dict[str, Any]) -> None:
        """Raise UserError for an argument of an installed package that may lead to a file.

        place: the import path of the definition that takes the arguments in `values`.
        """
        if is_below(place, "lightbase", *self.modules):
            return
        more = entries(values.get("dict_kwargs"))
        if more and is_below(place, "lightning"):
            self.refuse(f"{place} with dict_kwargs")
        for name, value in {**entries(values.get("init_args")), **more}.items():
            if not value or isinstance(value, int | float) or str(value) in self.typed:
                continue  # a number is no path: drop_path of timm
            if PLACES.fullmatch(name) or any(map(ADDRESS.match, strings(value))):
                self.refuse(f"{place} with {name} {str(value)[:60]!r}")

    def check_run(self, checkpoint: dict[str, Any], folder: Path | None) -> None:
        """Raise UserError where a resume would delete or write something outside the run's folder:
        by a path in the state of a callback, whose older files Lightning deletes, or by a link in
        the folder."""
        states = checkpoint.get("callbacks", {})
        for path in strings(states):
            if "://" in path or ".." in Path(path).parts:
                what = f"the state of a callback in {self.file} has the path {path[:60]!r}"
                raise UserError(f"{what}, which leads out of the run's folder\n{WAY_OUT}", 2)
        for file in folder.rglob("*") if folder else ():
            if file.is_symlink():
                raise UserError(f"{file} is a link: a resume would write there\n{WAY_OUT}", 2)

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


def returns_network(function: Any) -> bool:
    """Whether its annotations say so."""
    returned = inspect.signature(function, eval_str=True).return_annotation
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


def is_users_module(name: str, beside: Path) -> bool:
    """Whether the module lies directly in this repository or in the working folder, and is no
    folder that holds the file `beside`."""
    try:
        spec = importlib.util.find_spec(name)  # imports nothing
    except (ImportError, ValueError):
        return False
    if spec is None or not (spec.has_location or spec.submodule_search_locations):  # os has none
        return False
    paths = [Path(p).resolve() for p in spec.submodule_search_locations or [str(spec.origin)]]
    folder = beside.parent.resolve()
    roots = (PROJECT.root, Path.cwd())
    return all(path.parent in roots and not folder.is_relative_to(path) for path in paths)


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
    """All texts in nested dicts and lists, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)
