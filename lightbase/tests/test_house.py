"""The house of the library: commands import extras and core, extras import core. Each
extra can be deleted. Private attributes and loops of other packages stand in compat.py
only."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import programs
import pytest
import without_extra
from paths import HERE

import lightbase
from lightbase.core import compat

LIGHTBASE = Path(lightbase.__file__).parent
TESTS = LIGHTBASE / "tests"
FLOORS = ["core", "extras", "commands"]
EXTRAS = [path.stem for path in sorted((LIGHTBASE / "extras").glob("*.py"))]
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
DOCUMENTED = {"_exit", "_replace", "_fields", "_asdict"}  # of os and of named tuples
LOOPS = {"fit_loop", "epoch_loop", "epoch_progress", "batch_progress", "loops"}
"""What Lightning's loops and their part of a checkpoint are called."""
IMPORT_TESTS_NOT_YET = {
    "tests/test_on_gpu.py",
    "tests/test_several_gpus.py",
}
"""Files of tests that import from others, and are to stop it."""
IMPORT_FRONT_NOT_YET = {"lightbase.core.module"}
"""Modules that import a public name from `lightbase`, and are to stop it."""


def modules() -> list[Path]:
    """Return the files of the library without its tests."""
    files = sorted(LIGHTBASE.rglob("*.py"))
    return [file for file in files if TESTS not in file.parents]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    """Return the names of the modules that a file imports. A name that is imported from
    a package counts as a module, too."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def place(path: Path) -> str:
    return path.relative_to(LIGHTBASE).as_posix()


def test_the_example_uses_public_names_only() -> None:
    public = {"lightbase", *(f"lightbase.{name}" for name in lightbase.__all__)}
    for path in (HERE / "example").rglob("*.py"):
        assert {x for x in imports(path) if x.startswith("lightbase")} <= public, path


def test_the_library_does_not_import_a_project() -> None:
    for path in modules():
        assert "example" not in {name.partition(".")[0] for name in imports(path)}, path


def test_no_test_file_imports_another() -> None:
    importing = set()
    for path in TESTS.rglob("*.py"):
        if any(name.startswith("test_") for name in imports(path) - {path.stem}):
            importing.add(place(path))
    assert importing <= IMPORT_TESTS_NOT_YET


def floors_of(path: Path) -> set[str]:
    """Return the floors that a file imports."""
    names = [name.split(".") for name in imports(path)]
    return {name[1] for name in names if name[0] == "lightbase" and len(name) > 1}


def test_each_floor_imports_floors_below_it() -> None:
    """commands import extras and core, extras import core, core imports neither."""
    for i, floor in enumerate(FLOORS):
        for path in (LIGHTBASE / floor).glob("*.py"):
            assert not floors_of(path) & {*FLOORS[i + 1 :]}, place(path)


def test_no_extra_imports_another() -> None:
    for path in (LIGHTBASE / "extras").glob("*.py"):
        assert "extras" not in floors_of(path), place(path)


def test_imports_make_no_circle() -> None:
    """`__init__.py` imports the public names when they are used. It points outwards
    only: no file of the library imports it."""
    graph = {}
    for path in modules():
        module = f"lightbase.{path.relative_to(LIGHTBASE).with_suffix('')}"
        graph[module.replace("/", ".")] = imports(path)
    del graph["lightbase.__init__"]
    TopologicalSorter(graph).prepare()  # raises CycleError
    public = {f"lightbase.{name}" for name in lightbase.__all__}
    importing = {module for module, names in graph.items() if names & public}
    assert importing <= IMPORT_FRONT_NOT_YET


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(node: ast.AST) -> Iterator[str]:
    """Yield the private names that this node takes from an object, a module or a
    function's parameters."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not is_of_self(node):
        names = [node.attr]
    elif isinstance(node, ast.Import):
        names = ".".join(alias.name for alias in node.names).split(".")
    elif isinstance(node, ast.ImportFrom):
        names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Call):
        names = [str(keyword.arg) for keyword in node.keywords]
    for name in names:
        if PRIVATE.fullmatch(name) and name not in DOCUMENTED:
            yield name


def loop_names(node: ast.AST) -> Iterator[str]:
    """Yield what this node reads from Lightning's loops: an attribute or a key."""
    name = None
    if isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = node.slice.value
    if name in LOOPS:
        yield str(name)


@pytest.mark.parametrize("names_of", [private_names, loop_names])
def test_only_compat_reads_private_attributes_and_loops(names_of) -> None:
    names = {
        (place(path), name)
        for path in modules()
        if path != Path(compat.__file__)
        for node in nodes_of(path)
        for name in names_of(node)
    }
    assert names == set()


def run(folder: Path, *command: str | Path) -> str:
    """Run a program of this folder on the library in `folder`. Return its output."""
    command = (sys.executable, *command)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with programs.start(command, cwd=HERE, env=environment, **streams) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    return output


def test_an_import_changes_nothing_else() -> None:
    num_modules, changed = run(LIGHTBASE.parent, HERE / "importing.py").split(
        maxsplit=1
    )
    assert int(num_modules) > 40
    assert changed == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_can_be_deleted(name: str, tmp_path: Path) -> None:
    """With its lines in commands/ and `__init__.py`, its script and its tests. The
    other tests can be imported, and a training runs."""
    copy = tmp_path / "lightbase"
    shutil.copytree(LIGHTBASE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    without_extra.delete_extra(copy, name)
    program = copy / "tests" / "without_extra.py"
    printed = run(tmp_path, program, tmp_path / "logs")
    assert "Test of the best checkpoint" in printed
