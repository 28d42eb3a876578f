"""The notebook docs/tour.ipynb and the snippets of docs/python.md run as they stand,
from any folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from pages import text_of

REDIRECT = """
from pathlib import Path
from lightbase.config.paths import Project
Project.logs = Path.cwd().parent / "logs"
"""
"""Keeps the runs out of the repository."""
SHORTER = {
    "num_train=1000, num_test=200": "num_train=200, num_test=60",
    '{"model.lr": 0.002}': '{"model.lr": 0.002, "data.num_train": 200}',
}
"""Fewer samples than in docs/python.md."""


def run(code: list[str], folder: Path) -> str:
    """Run lines of code in a folder beside logs/. Return the output."""
    (folder / "elsewhere").mkdir()
    file = folder / "cells.py"
    file.write_text("\n".join([REDIRECT, *code]))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = (sys.executable, file)
    process = programs.start(command, cwd=folder / "elsewhere", **streams)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert not [*(folder / "elsewhere").iterdir()]
    return output


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_one_after_the_other(tmp_path: Path) -> None:
    pytest.importorskip("project.models.cnn")
    cells = json.loads(text_of("docs/tour.ipynb"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    output = run([*code, "print('tested', result['test/acc'] > 0.8)"], tmp_path)
    assert output.rstrip().endswith("tested True")
    assert (tmp_path / "logs" / "tour" / "version_0" / "metrics.json").is_file()


@pytest.mark.slow
def test_the_snippets_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    for module in ("project.models.cnn", "project.data.synthetic"):
        pytest.importorskip(module)
    code = re.findall(r"```python\n(.*?)```", text_of("docs/python.md"), re.S)
    assert len(code) > 8
    text = "\n".join([*code, "assert result.best_epoch"])
    for whole, shorter in SHORTER.items():
        assert whole in text
        text = text.replace(whole, shorter)
    run([text], tmp_path)
    assert len([*tmp_path.glob("logs/*/version_0/metrics.json")]) == 3
