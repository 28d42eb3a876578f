"""Imports point one way: the project imports the library, and never the other way round."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import programs
from paths import HERE

import lightbase

LIGHTBASE = Path(lightbase.__file__).parent


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


def test_an_import_changes_nothing_else() -> None:
    command = [sys.executable, str(Path(__file__).with_name("importing.py"))]
    environment = os.environ | {"PYTHONPATH": str(LIGHTBASE.parent)}
    with programs.start(command, cwd=HERE, env=environment, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=100)
    num_modules, changed = output.split(maxsplit=1)
    assert int(num_modules) > 50
    assert changed == "[]\n"
