"""Imports point one way: the project imports the library, and never the other way round. Private
attributes of other packages stand in compat.py only."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import programs
from paths import HERE

import lightbase
from lightbase import compat

LIGHTBASE = Path(lightbase.__file__).parent
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
DOCUMENTED = {"_exit", "_replace", "_fields", "_asdict"}  # of os and of named tuples


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {*names, *(a.name for node in nodes if isinstance(node, ast.Import) for a in node.names)}


def test_the_example_uses_public_names_only() -> None:
    for path in (HERE / "example").rglob("*.py"):
        known = {name for name in imports(path) if name.startswith("lightbase")}
        assert known <= {"lightbase", "lightbase.data.transforms"}, path


def test_the_library_does_not_import_a_project() -> None:
    for path in LIGHTBASE.rglob("*.py"):
        assert "example" not in {name.partition(".")[0] for name in imports(path)}, path


BELOW = ["tools", "run", "resume", "cli", "watch", "devices", "data"]


def test_each_part_imports_parts_below_it() -> None:
    """As docs/architecture.md draws them. The modules beside these folders know data/ only."""
    for path in LIGHTBASE.rglob("*.py"):
        room, *_ = path.relative_to(LIGHTBASE).parts
        if room == "__init__.py":
            continue
        above = BELOW[: BELOW.index(room)] if room in BELOW else BELOW[:-1]
        names = {name.split(".")[1] for name in imports(path) if name.startswith("lightbase.")}
        if room == "module.py":
            names.discard("run")  # load_from_checkpoint builds the model from the run's config
        assert not names & {*above}, path


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(node: ast.AST) -> Iterator[str]:
    """Private names that this node takes from an object, a module or a function's parameters."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not is_of_self(node):
        names = [node.attr]
    elif isinstance(node, ast.Import | ast.ImportFrom):
        paths = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        names = [part for path in paths for part in path.split(".")]
    elif isinstance(node, ast.Call):
        names = [keyword.arg or "" for keyword in node.keywords]
    return (name for name in names if PRIVATE.fullmatch(name) and name not in DOCUMENTED)


def test_only_compat_reads_private_attributes() -> None:
    names = {
        (str(path.relative_to(LIGHTBASE)), name)
        for path in LIGHTBASE.rglob("*.py")
        if path != Path(compat.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in private_names(node)
    }
    assert names == set()


def test_an_import_changes_nothing_else() -> None:
    command = [sys.executable, str(Path(__file__).with_name("importing.py"))]
    environment = os.environ | {"PYTHONPATH": str(LIGHTBASE.parent)}
    with programs.start(command, cwd=HERE, env=environment, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=100)
    num_modules, changed = output.split(maxsplit=1)
    assert int(num_modules) > 40
    assert changed == "[]\n"
