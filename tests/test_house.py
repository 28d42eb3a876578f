"""Imports point one way: what a user edits knows base/ at most, and only engine/ and scripts/ know
engine/."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import programs

import project

ROOT = Path(project.__path__[0])
MAY_KNOW = {  # a room of project/, and the rooms that it may import besides itself
    "models": set(),
    "base": set(),
    "data": {"base"},
    "callbacks": {"base"},
    "engine": {"base", "callbacks"},
}


def test_imports_point_one_way() -> None:
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        known = {
            parts[1]
            for name in names
            if (parts := name.split("."))[0] == ROOT.name and len(parts) > 1
        } - {room}
        assert known <= MAY_KNOW[room] if room in MAY_KNOW else "engine" not in known, (
            f"{path} imports {known}"
        )


def test_an_import_changes_nothing_else() -> None:
    command = [sys.executable, str(Path(__file__).with_name("importing.py"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    with programs.start(
        command, cwd=ROOT.parent, env=environment, stdout=subprocess.PIPE
    ) as process:
        output, _ = process.communicate(timeout=100)
    num_modules, changed = output.split(maxsplit=1)
    assert int(num_modules) > 50
    assert changed == "[]\n"
