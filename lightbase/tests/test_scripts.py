"""What evaluate.py, predict.py and export.py share, in process and as a user starts
them, and how files are written."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import HERE, TINY, fails, script
from PIL import Image
from written import checkpoint_file, equal, weights

from lightbase.commands.flags import evaluate_flags, export_flags, predict_flags
from lightbase.config.errors import UserError
from lightbase.config.files import write_whole
from lightbase.data.tensors import read_image


def test_64_true_is_float64_in_a_resume_a_test_and_an_exported_file(train, tmp_path):
    flags = "--trainer.precision 64-true --trainer.limit_test_batches 2 --trainer.max_epochs"
    metrics = train(flags, 4, "--name straight")
    train(flags, 2, "--name resumed")
    train(flags, 4, "--name resumed --ckpt_path last")
    straight = tmp_path / "straight" / "version_0"
    expected = weights(straight)
    assert expected["net.layers.1.weight"].dtype == torch.float64
    assert equal(expected, weights(tmp_path / "resumed" / "version_0"))
    best = checkpoint_file(straight)
    flag = ["--ckpt_path", str(best)]
    again = script("evaluate").main(flag)
    assert again == {name: metrics[name] for name in again}
    file = script("export").main([*flag, "--format", "pt2"])
    exported = torch.export.load(file).module()
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    assert exported(images).dtype == torch.float64


def test_a_name_or_last_stands_for_a_checkpoint_below_the_typed_root(tmp_path, capsys):
    names = ["mlp/version_2/best", "mlp/version_10/best", "mlp/version_10/last"]
    names += ["cnn/version_0/last"]
    files = []
    for time, name in enumerate(names):
        file = checkpoint_file(tmp_path / Path(name).parent, Path(name).name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (time, time))
        files.append(file)
    root = f"--trainer.default_root_dir={tmp_path}"

    def named(text):
        words = [root, "--ckpt_path", text]
        (path,) = {
            read(words).ckpt_path
            for read in (evaluate_flags, predict_flags, export_flags)
        }
        return path

    assert named("mlp/version_2") == files[0]
    for text in ("best", "mlp", f"{tmp_path}/mlp/version_10"):
        assert named(text) == files[1]
    assert named("last") == files[3]  # of all names
    with pytest.raises(UserError, match="with this checkpoint"):
        named("mpl")
    resume = [root, "--name=mlp", "--ckpt_path=last"]  # of this name
    error = fails(capsys, 1, lambda: script("train").main(["--config", TINY, *resume]))
    assert f"checkpoint {files[2]} is damaged" in error


@pytest.mark.linux
def test_the_link_that_a_crash_has_left_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / ".new.part").symlink_to(target)
    write_whole(tmp_path / "new", "written")
    assert (tmp_path / "new").read_text() == "written"
    assert target.read_text() == "mine"


def test_a_grey_image_of_16_bits(tmp_path):
    values = np.full((8, 8), 65535, dtype="uint16")
    values[:, :4] = 65535 / 2
    Image.fromarray(values).save(tmp_path / "x.tiff")
    pixels = read_image(tmp_path / "x.tiff", (1, 8, 8))[0]
    assert pixels[0, 7] == 255
    assert abs(int(pixels[0, 0]) - 127) <= 1


@pytest.mark.parametrize(("mode", "name"), [("RGB", "x.png"), ("CMYK", "x.jpg")])
def test_colours_of_each_mode(tmp_path, mode, name):
    Image.new("RGB", (8, 8), (200, 100, 50)).convert(mode).save(tmp_path / name)
    colours = read_image(tmp_path / name, (3, 8, 8)).float().mean((1, 2))
    expected = torch.tensor([200.0, 100.0, 50.0])
    torch.testing.assert_close(colours, expected, atol=3, rtol=0)


def test_transparent_and_turned_images(tmp_path):
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read_image(tmp_path / "clear.png", (3, 8, 8)) == 255).all()
    photo = Image.new("L", (16, 8))
    photo.paste(255, (0, 0, 8, 8))  # left half white
    exif = photo.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    photo.save(tmp_path / "photo.png", exif=exif)
    upright = read_image(tmp_path / "photo.png", (1, 16, 8))[0]
    assert upright[0].min() > 200 > 50 > upright[-1].max()


@pytest.mark.linux
def test_the_slurm_script_goes_on_in_its_own_run_and_puts_a_stopped_job_back(
    tmp_path, monkeypatch
):
    """With stand-ins for srun and scontrol, which write down how they are called."""
    for name, end in (("srun", 143), ("scontrol", 0)):
        text = f'#!/bin/sh\necho {name} "$@" >> calls\nexit {end}\n'
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    command = ["bash", str(HERE / "scripts" / "slurm.sh"), "--config", "a b.yaml"]
    assert subprocess.run(command, cwd=tmp_path).returncode == 143
    last = checkpoint_file(tmp_path / "logs" / "slurm_7" / "version_0", "last")
    last.parent.mkdir(parents=True)
    last.touch()
    assert subprocess.run(command, cwd=tmp_path).returncode == 143
    started = "srun --kill-on-bad-exit=1 --cpus-per-task=4 python scripts/train.py"
    started += " --config a b.yaml --name slurm_7"
    back = "scontrol requeue 7"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [started, back, f"{started} --ckpt_path last", back]
