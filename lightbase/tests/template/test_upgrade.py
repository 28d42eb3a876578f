"""A project that was made from version 0.3 of the template takes today's library, as
docs/upgrade.md says. Its files are those of a real commit."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from pages import PACKAGE, REPO, commands, text_of
from PIL import Image

OF_0_3 = "651ef6d"  # the last commit of version 0.3
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")
SHORT = (
    "--trainer.accelerator=cpu",
    "--trainer.limit_train_batches=40",
    "--trainer.log_every_n_steps=20",
)

SCRIPT = (sys.executable, "scripts/train.py")
FOLDERS = (
    *("--name=folders", "--data=lightbase.ImageFolder", "--data.data_dir=photos"),
    *("--model.net=project.models.mlp.MLP", "--model.net.sizes=[192,4,2]"),
    *("--data.image_shape=[3,8,8]", "--data.batch_size=8"),
    "--model.scheduler=lightbase.optim.FinalDecayLR",
    "--model.scheduler_args={total_steps: 50}",
)
"""A run of version 0.3 with classes that have moved since."""


def call(folder: Path, *command: str) -> str:
    """Run a command in a folder. Return what it prints."""
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if command[0] == sys.executable:
        process = programs.start(command, cwd=folder, env=env, **streams)
    else:
        process = subprocess.Popen(command, cwd=folder, env=env, text=True, **streams)
    printed, _ = process.communicate()
    assert process.returncode == 0, f"{shlex.join(command)}\n{printed}"
    return printed


def train(project: Path, config: str, *flags: str) -> str:
    words = ("scripts/train.py", f"--config={config}", *SHORT, *flags)
    return call(project, sys.executable, *words)


def take(template: Path, project: Path) -> None:
    """Make a project of version 0.3 in `project`, and a clone of today's template."""
    shown = subprocess.run([*GIT, "-C", str(REPO), "cat-file", "-e", OF_0_3])
    if shown.returncode:
        pytest.skip(f"this clone has no history back to {OF_0_3}")
    for folder, commit in ((template, "HEAD"), (project, OF_0_3)):
        call(REPO, *GIT, "clone", "-q", "--no-checkout", str(REPO), str(folder))
        call(folder, *GIT, "checkout", "-q", "-B", "main", commit)
    call(project, *GIT, "remote", "remove", "origin")


@pytest.mark.slow
@pytest.mark.linux
def test_a_project_of_version_0_3_takes_todays_library(tmp_path: Path) -> None:
    template, project = tmp_path / "template", tmp_path / "project"
    take(template, project)
    config = "configs/small_net.yaml"
    train(project, config, "--trainer.max_epochs=1")
    for name in ("a", "b"):
        for split in ("train", "test"):
            (project / "photos" / split / name).mkdir(parents=True)
            for i in range(60):
                image = Image.new("RGB", (8, 8), (i, 128, 4 * (name == "a")))
                image.save(project / "photos" / split / name / f"{i}.png")
    words = (*SCRIPT, *SHORT, "--trainer.max_epochs=1")
    call(project, *words, *FOLDERS)

    page = text_of("docs/upgrade.md")
    typed = [command for command in commands(page) if command.startswith("git ")]
    for command in [*typed[:3], *typed[-2:]]:
        words = shlex.split(command.replace("URL", str(template)))
        call(project, *GIT, *words[1:])
    settings = project / "pyproject.toml"
    text = re.sub(r"(?m)^(testpaths|pythonpath) = .*\n", "", settings.read_text())
    for key, value in re.findall(r"`(\w+) = (\[.*?\])`", page):
        assert key in ("testpaths", "pythonpath")
        text = text.replace(
            "[tool.pytest.ini_options]\n",
            f"[tool.pytest.ini_options]\n{key} = {value}\n",
        )
    text += f'\n[tool.lightbase]\ndefault_model = "{PACKAGE}.classifier.Classifier"\n'
    settings.write_text(text)
    for name in ("classifier", "regressor"):
        file = project / PACKAGE / f"{name}.py"
        assert "let all steps call `self` where they call `self.net`" in page
        text = file.read_text().replace("self.net(x)", "self(x)")
        file.write_text(text.replace("(net or self.net)", "(net or self)"))

    # its YAML names settings and classes of 0.3, and its run continues
    flags = ("--trainer.max_epochs=2", "--ckpt_path=last")
    printed = train(project, config, *flags)
    assert "Trained 2 epochs" in printed
    run = "logs/small_net/version_0"
    again = ("--name=folders", "--ckpt_path=last", "--trainer.max_epochs=2")
    assert "Trained 2 epochs" in call(project, *SCRIPT, *again)
    evaluate = ("scripts/evaluate.py", f"--ckpt_path={run}/checkpoints/best.ckpt")
    assert '"test/acc"' in call(project, sys.executable, *evaluate)
    assert "Trained 2 epochs" in train(project, f"{run}/config.yaml", "--name=again")

    pytest_as_file = str(Path(pytest.__file__).with_name("__main__.py"))
    tests = (pytest_as_file, "-q", "-n0", "tests", "lightbase/tests/template")
    assert " passed" in call(project, sys.executable, *tests)
