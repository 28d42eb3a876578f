"""sweep.py --storage: a study in PostgreSQL, shared by several processes. The server is
started here, if it is installed."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from paths import HERE, TINY, fails, script
from ranks import free_port

optuna = pytest.importorskip("optuna")
sweep_module = importlib.import_module("lightbase.compare.sweep")
SERVER = [*Path("/usr/lib/postgresql").glob("*/bin/initdb"), shutil.which("initdb")]


@pytest.fixture
def database() -> Iterator[str]:
    """Start a server of its own, which does not run as root. Return its URL."""
    pytest.importorskip("psycopg")
    if SERVER == [None]:
        pytest.skip("PostgreSQL is not installed")
    # a folder of pytest may be entered by one user only
    folder = Path(tempfile.mkdtemp(prefix="postgres", dir="/tmp"))
    user = None
    if os.getuid() == 0:
        user = "nobody"
        shutil.chown(folder, user)
    port = free_port()

    def call(name: str, *args: str) -> None:
        command = [str(Path(str(SERVER[0])).parent / name), *args]
        with (folder / "output.txt").open("a") as output:  # the server keeps it
            subprocess.run(command, check=True, user=user, stdout=output, cwd="/")

    data = str(folder / "data")
    call("initdb", "-D", data, "-A", "trust", "-U", "tests")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
    call("pg_ctl", "-D", data, "-w", "-o", options, "start")
    try:
        yield f"postgresql+psycopg://tests@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.linux
def test_processes_share_a_database_and_one_that_is_killed_is_continued(
    database, tmp_path
):
    flags = f"--config {TINY} --trainer.default_root_dir logs --storage {database}"
    flags += " --search model.lr=0.001,0.01,0.03,0.1 --name grid"
    command = [sys.executable, str(HERE / "scripts" / "sweep.py"), *flags.split()]
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    killed, other = (programs.start(command, **how) for _ in range(2))
    while not [*tmp_path.rglob("last.ckpt")]:
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    output, _ = other.communicate(timeout=programs.LIMIT_S)
    assert other.returncode == 0, output
    storage = optuna.storages.RDBStorage(database)
    trials = optuna.load_study(study_name="grid", storage=storage).trials
    storage.remove_session()
    storage.engine.dispose()
    assert [trial.state.name for trial in trials] == 4 * ["COMPLETE"]
    rates = [trial.params["model.lr"] for trial in trials]
    assert rates == ["0.001", "0.01", "0.03", "0.1"]
    for number in range(4):  # each was trained once
        versions = (tmp_path / f"logs/grid/trial_00{number}").glob("version_*")
        assert [version.name for version in versions] == ["version_0"]
    assert not [*tmp_path.rglob("study.journal")]


def test_a_wrong_url_is_refused(tmp_path, capsys):
    flags = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path)]
    flags += ["--search", "model.lr=0.1,0.2", "--storage", "nothing://here/it"]
    error = fails(capsys, 2, lambda: script("sweep").main(flags))
    assert "--storage: Can't load plugin: sqlalchemy.dialects:nothing" in error
