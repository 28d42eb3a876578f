"""The programs of docs/export.md run as they stand, and agree with predict.py."""

import json
import runpy

import numpy as np
import pytest
from pages import REPO, commands, run, script, write_files
from PIL import Image


@pytest.mark.slow
def test_each_example_of_the_page_runs_as_it_stands(
    tmp_path, mnist_dir, cifar10_dir, capsys, monkeypatch
):
    page = (REPO / "docs" / "export.md").read_text()
    assert mnist_dir == cifar10_dir == tmp_path / "data"
    write_files(page, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("cifar10_cnn", "mnist_mlp"):
        run(f"python scripts/train.py --config configs/{name}.yaml", tmp_path)
    assert len(commands(page)) == 3
    for command in commands(page):
        run(command, tmp_path)

    def output_of(example: str, *args: str) -> list[str]:
        assert "lightbase" not in (tmp_path / example).read_text()
        monkeypatch.setattr("sys.argv", [example, *args])
        capsys.readouterr()
        runpy.run_path(example)
        return capsys.readouterr().out.splitlines()

    for i, size in enumerate([(50, 40), (20, 33)]):
        noise = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).convert("RGB" if i else "L").save(f"{i}.png")
    found = output_of("with_onnx.py", "0.png", "1.png")
    capsys.readouterr()
    script("predict").main(
        ["--ckpt_path", "logs/cifar10_cnn/version_0/checkpoints/best.ckpt", "0.png", "1.png"]
    )
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line.split()[:2] for line in found] == [row[:2] for row in table]
    assert [float(line.split()[2]) for line in found] == pytest.approx(
        [float(row[2]) for row in table], abs=2e-4
    )
    assert [line.split()[0].isalpha() for line in output_of("with_pt2.py")] == [True] * 5
    assert len(json.loads(output_of("with_pth.py")[0])) == 5
