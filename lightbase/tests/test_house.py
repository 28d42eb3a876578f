"""Imports point one way: the project imports the library, and never the other way
round. Private attributes of other packages stand in compat.py only."""

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
from lightbase.core import compat

LIGHTBASE = Path(lightbase.__file__).parent
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
DOCUMENTED = {"_exit", "_replace", "_fields", "_asdict"}  # of os and of named tuples


def modules() -> list[Path]:
    """The files of the library without those of its tests."""
    files = sorted(LIGHTBASE.rglob("*.py"))
    return [file for file in files if LIGHTBASE / "tests" not in file.parents]


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {
        *names,
        *(a.name for node in nodes if isinstance(node, ast.Import) for a in node.names),
    }


def test_the_example_uses_public_names_only() -> None:
    for path in (HERE / "example").rglob("*.py"):
        known = {name for name in imports(path) if name.startswith("lightbase")}
        assert known <= {"lightbase", "lightbase.extras.transforms"}, path


def test_the_library_does_not_import_a_project() -> None:
    for path in modules():
        assert "example" not in {name.partition(".")[0] for name in imports(path)}, path


FLOORS = ["core", "extras", "commands"]
NOT_YET = {
    ("core/callbacks.py", "extras"),
    ("core/data.py", "extras"),
    ("core/run.py", "commands"),
    ("core/run.py", "extras"),
    ("core/training_cli.py", "commands"),
    ("core/training_cli.py", "extras"),
    ("core/config.py", "commands"),
    ("core/module.py", "commands"),
}
"""Imports of an upper floor that are there."""


def test_each_floor_imports_floors_below_it() -> None:
    """commands import extras and core, extras import core, core imports neither."""
    upward = set()
    for path in modules():
        floor, *_ = path.relative_to(LIGHTBASE).parts
        if floor not in FLOORS:
            continue
        above = FLOORS[FLOORS.index(floor) + 1 :]
        for name in imports(path):
            if name.startswith("lightbase.") and name.split(".")[1] in above:
                upward.add((path.relative_to(LIGHTBASE).as_posix(), name.split(".")[1]))
    assert upward == NOT_YET


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(node: ast.AST) -> Iterator[str]:
    """Private names that this node takes from an object, a module or a function's
    parameters."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not is_of_self(node):
        names = [node.attr]
    elif isinstance(node, ast.Import | ast.ImportFrom):
        paths = [
            getattr(node, "module", None) or "",
            *(alias.name for alias in node.names),
        ]
        names = [part for path in paths for part in path.split(".")]
    elif isinstance(node, ast.Call):
        names = [keyword.arg or "" for keyword in node.keywords]
    return (
        name for name in names if PRIVATE.fullmatch(name) and name not in DOCUMENTED
    )


def test_only_compat_reads_private_attributes() -> None:
    names = {
        (str(path.relative_to(LIGHTBASE)), name)
        for path in modules()
        if path != Path(compat.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in private_names(node)
    }
    assert names == set()


def test_an_import_changes_nothing_else() -> None:
    command = [sys.executable, str(Path(__file__).with_name("importing.py"))]
    environment = os.environ | {"PYTHONPATH": str(LIGHTBASE.parent)}
    with programs.start(
        command, cwd=HERE, env=environment, stdout=subprocess.PIPE
    ) as process:
        output, _ = process.communicate(timeout=100)
    num_modules, changed = output.split(maxsplit=1)
    assert int(num_modules) > 40
    assert changed == "[]\n"
