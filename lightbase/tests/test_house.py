"""The house of the library: rooms, and arrows that point one way. Private attributes and loops of other packages stand in compat.py only."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import programs
import pytest
from paths import HERE

import lightbase

LIGHTBASE = Path(lightbase.__file__).parent
PUBLIC = {f"lightbase.{name}" for name in lightbase.__all__}
ROOMS = [
    "compare",
    "commands",
    "watch",
    "checks",
    "setup",
    "run",
    "model",
    "data",
    "config",
]
"""From top to bottom."""
ALONE = ("lightbase.compat", "lightbase.data.transforms")
"""Files that import nothing of the library."""
LOOPS = "fit_loop|epoch_loop|epoch_progress|batch_progress|loops"
"""What Lightning's loops and their part of a checkpoint are called."""
OF_OTHERS = re.compile(
    # private attributes; those of `self`, of `os` and of named tuples are allowed
    r"(?<!\bself)(?<!\bcls)\.(?!_exit|_replace|_fields|_asdict)_[a-zA-Z]\w*"
    r"|import .*\b_[a-zA-Z]\w*"  # private modules and names
    r"|[(,] ?_[a-zA-Z]\w*="  # private parameters
    rf"|\.(?:{LOOPS})\b|\['(?:{LOOPS})'\]"
)


def modules() -> dict[str, Path]:
    """Return the files of the library without its tests, by the names of modules."""
    return {
        ".".join(path.relative_to(LIGHTBASE.parent).with_suffix("").parts): path
        for path in LIGHTBASE.rglob("*.py")
        if HERE not in path.parents
    }


def imports(path: Path) -> set[str]:
    """Return the names of the modules that a file imports. A name that is imported from
    a package counts as a module, too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_down_and_make_no_circle() -> None:
    """A room imports itself and the rooms after it in ROOMS. compat.py imports nothing
    of the library, and neither do the transforms of images; everyone may import them.
    No file imports a project. `__init__.py` imports the public names when they are
    used, and no file of the library imports it."""
    graph = {module: imports(path) for module, path in modules().items()}
    assert {path.parent.name for path in modules().values()} == {*ROOMS, LIGHTBASE.name}
    del graph["lightbase.__init__"]
    for module, names in graph.items():
        room = module.split(".")[1]
        above = ROOMS[: ROOMS.index(room)] if room in ROOMS else ROOMS
        if module in ALONE:
            above = ROOMS
        forbidden = ("example", *[f"lightbase.{name}" for name in above])
        assert not [name for name in names if name.startswith(forbidden)], module
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert not [module for module, names in graph.items() if names & PUBLIC]


def test_the_rooms_are_those_of_the_house() -> None:
    rooms = Counter(path.parent.name for path in modules().values())
    assert rooms.keys() == {*ROOMS, LIGHTBASE.name}
    assert max(rooms.values()) <= 10


def test_only_compat_reads_private_attributes_and_loops() -> None:
    for module, path in modules().items():
        text = ast.unparse(ast.parse(path.read_text()))  # without comments
        is_compat = module == "lightbase.compat"
        assert bool(OF_OTHERS.search(text)) == is_compat, OF_OTHERS.findall(text)


def run(folder: Path, *command: str | Path) -> str:
    """Run a program of this folder on the library in `folder`. Return its output."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = (sys.executable, *command)
    with programs.start(words, cwd=HERE, env=environment, **streams) as process:
        output, _ = process.communicate(timeout=programs.LIMIT_S)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_an_import_changes_nothing_else() -> None:
    pytest.importorskip("optuna")
    num_modules, changed = run(LIGHTBASE.parent, HERE / "importing.py").split(
        maxsplit=1
    )
    assert int(num_modules) > 40
    assert changed == "[]\n"


@pytest.mark.slow
def test_tests_need_no_optional_package_to_be_collected(tmp_path: Path) -> None:
    packages = "hypothesis,mlflow,onnx,onnxruntime,onnxscript,optuna,safetensors,timm"
    program = HERE / "without_packages.py"
    flags = ["-n0", "-q", "--collect-only", "-m", "", "-p", "no:cacheprovider"]
    printed = run(LIGHTBASE.parent, program, f"{packages},wandb", *flags, HERE)
    assert "tests collected" in printed
    assert "test_export.py" in printed
