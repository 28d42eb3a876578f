"""The notebook of docs/python.md runs as it stands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import text_of


def test_the_cells_of_the_notebook_run_one_after_the_other(tmp_path: Path) -> None:
    pytest.importorskip("project.models.cnn")
    cells = json.loads(text_of("docs/tour.ipynb"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = "\n".join([*code, "print('metrics', metrics['test/acc'] > 0.8)"])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("metrics True")
    assert "a run of objects" in done.stdout
    assert (tmp_path / "logs" / "tour" / "version_0" / "metrics.json").is_file()
