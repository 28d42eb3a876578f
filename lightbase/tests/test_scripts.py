"""What evaluate.py, predict.py and export.py share, in process and as a user starts
them, and how files are written."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from paths import HERE, Trained, fails, script
from PIL import Image
from written import checkpoint_file as best_of

from lightbase.commands.arguments import checkpoint_file
from lightbase.core.errors import UserError
from lightbase.core.files import write_whole
from lightbase.core.images import read_image
from lightbase.core.load import load_run


def test_64_true_is_float64_in_a_resume_a_test_and_an_exported_file(train, tmp_path):
    flags = "--trainer.precision 64-true --trainer.limit_test_batches 2 "
    flags += "--trainer.max_epochs"
    metrics = train(flags, 4, "--name straight")
    train(flags, 2, "--name resumed")
    train(flags, 4, "--name resumed --ckpt_path last")
    runs = [
        tmp_path / name / "version_0" / "checkpoints"
        for name in ("straight", "resumed")
    ]
    weights = [
        torch.load(run / "last.ckpt", weights_only=True)["state_dict"] for run in runs
    ]
    assert weights[0]["net.layers.1.weight"].dtype == torch.float64
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    flag = ["--ckpt_path", str(runs[0] / "best.ckpt")]
    assert script("evaluate").main(flag) == {
        name: metrics[name] for name in metrics if name[:5] == "test/"
    }
    file = script("export").main([*flag, "--format", "pt2"])
    net = torch.export.load(file).module()
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    _, model, data = load_run(Path(flag[1]))
    with torch.no_grad():
        inputs = data.normalize(images).double()
        expected = model.eval().net(inputs).softmax(1)
    assert net(images).dtype == torch.float64
    torch.testing.assert_close(net(images), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ["evaluate", "predict", "export"])
def test_mistakes_common_to_the_scripts(name, tmp_path, capsys):
    def error(status: int, *args: str) -> str:
        image = ["x.png"] if name == "predict" else []
        return fails(capsys, status, lambda: script(name).main([*args, *image]))

    assert "none.ckpt" in error(1, "--ckpt_path", str(tmp_path / "none.ckpt"))
    assert "--ckpt_path" in error(2)
    assert "--ckpt" in error(2, "--ckpt", "x", "--ckpt_path", __file__)


def test_the_name_of_a_run_stands_for_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("lightbase.core.project.Project.logs", tmp_path / "logs")
    files = {"mlp/version_2": "best", "mlp/version_10": "best", "cnn/version_0": "last"}
    for time, (name, which) in enumerate(files.items()):
        (tmp_path / "logs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "logs" / name / "checkpoints" / f"{which}.ckpt").touch()
        os.utime(
            tmp_path / "logs" / name / "checkpoints" / f"{which}.ckpt", (time, time)
        )
    typed = ["mlp/version_2", "best", "last", "mlp", f"{tmp_path}/logs/mlp/version_10"]
    paths = map(checkpoint_file, typed)
    assert [
        path.parent.parent.name[8:] + path.stem for path in paths if path.is_file()
    ] == [*("2best", "10best", "0last", "10best", "10best")]
    with pytest.raises(
        UserError, match="nor a run with this checkpoint; did you mean mlp"
    ):
        checkpoint_file("mpl")


@pytest.mark.linux
def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "file"
    target.parent.mkdir()
    target.write_text("mine")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "folder").symlink_to(target.parent)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "folder").symlink_to(target.parent)
    for name in ("link", "folder/file", "folder/new", "deep/folder/file"):
        with pytest.raises(UserError, match="through a link"):
            write_whole(tmp_path / name, "theirs")
    # what a crash may have left
    (tmp_path / ".new.part").symlink_to(target)
    write_whole(tmp_path / "new", "written")
    assert (tmp_path / "new").read_text() == "written"
    assert target.read_text() == "mine"
    assert [*target.parent.iterdir()] == [target]


def test_grey_white_transparent_and_turned_images(tmp_path: Path) -> None:
    for white, dtype in (
        (65535, "uint16"),
        (1, "float32"),
        (65535, "int32"),
        (255, "uint8"),
    ):
        values = np.full((8, 8), white, dtype=dtype)
        values[:, :4] = values[0, 0] / 2
        Image.fromarray(values).save(tmp_path / "x.tiff")
        pixels = read_image(tmp_path / "x.tiff", (1, 8, 8))[0]
        assert pixels[0, 7] == 255
        assert abs(int(pixels[0, 0]) - 127) <= 1
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read_image(tmp_path / "clear.png", (3, 8, 8)) == 255).all()
    photo = Image.new("L", (16, 8))
    photo.paste(255, (0, 0, 8, 8))  # left half white
    exif = photo.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    photo.save(tmp_path / "photo.png", exif=exif)
    upright = read_image(tmp_path / "photo.png", (1, 16, 8))[0]
    assert upright[0].min() > 200 > 50 > upright[-1].max()


@pytest.mark.slow
def test_the_scripts_run_as_programs(trained: Trained, tmp_path: Path) -> None:
    folder, metrics = trained()
    ckpt = ["--ckpt_path", str(best_of(folder))]
    black = str(tmp_path / "black.png")
    Image.new("RGB", (5, 5)).save(black)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for name, *args, words in (
        ("evaluate.py", f'"test/acc": {metrics["test/acc"]}'),
        ("export.py", "--output", "x.pth", "MLP, weights: x.pth"),
        ("predict.py", black, "black.png"),
    ):
        root = ["--trainer.default_root_dir", str(folder.parents[1])]
        command = [sys.executable, str(HERE / "scripts" / name), *ckpt, *args, *root]
        with programs.start(command, cwd=tmp_path, **pipes) as process:
            output, error = process.communicate()
        assert (process.returncode, error) == (0, "")
        assert words in output


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (143, True), (1, False)])
@pytest.mark.linux
def test_the_slurm_script_goes_on_in_its_own_run_and_puts_a_stopped_job_back(
    tmp_path, status, requeued
):
    """With stand-ins for srun and scontrol, which write down how they are called."""
    for name, end in (("srun", status), ("scontrol", 0)):
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> calls\nexit {end}\n'
        )
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
    }
    environment["SLURM_CPUS_PER_TASK"] = "4"
    command = ["bash", str(HERE / "scripts" / "slurm.sh"), "--config", "a b.yaml"]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == status
    (tmp_path / "logs" / "slurm_7" / "version_0" / "checkpoints").mkdir(parents=True)
    (tmp_path / "logs" / "slurm_7" / "version_0" / "checkpoints" / "last.ckpt").touch()
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == status
    calls = (tmp_path / "calls").read_text().splitlines()
    started = "srun --kill-on-bad-exit=1 --cpus-per-task=4 python scripts/train.py"
    started += " --config a b.yaml --name slurm_7"
    back = ["scontrol requeue 7"] * requeued
    assert calls == [started, *back, f"{started} --ckpt_path last", *back]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("evaluate", "open_checkpoint"),
        ("predict", "open_checkpoint"),
        ("tune", "parse"),
    ],
)
@pytest.mark.linux
def test_ctrl_c_ends_a_script_in_one_line(monkeypatch, capsys, name, first):
    module = script(name)
    monkeypatch.setattr(
        module, first, lambda *_, **__: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(SystemExit) as caught:
        module.main([] if name == "tune" else ["--ckpt_path", __file__])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C\n"
