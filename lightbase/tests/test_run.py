"""The folder of a run and what the run writes down about itself."""

import shutil

import pytest
from lightning import Callback

import lightbase
from lightbase.config.errors import UserError
from lightbase.run.folder import LockedFolder


def test_versions_count_up_and_never_reuse_a_folder(tmp_path):
    assert LockedFolder(tmp_path, "a").folder == tmp_path / "a" / "version_0"
    assert LockedFolder(tmp_path, "a").folder == tmp_path / "a" / "version_1"
    (tmp_path / "a" / "version_9").mkdir()
    (tmp_path / "a" / "version_x").mkdir()
    assert LockedFolder(tmp_path, "a").folder.name == "version_10"


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path):
    first = LockedFolder(tmp_path, "a")
    with pytest.raises(UserError, match="in use"):
        LockedFolder(tmp_path, "a", first.folder)
    first.close()
    LockedFolder(tmp_path, "a", first.folder).close()
    assert not list(first.folder.iterdir())


class RemovesFolder(Callback):
    """Removes the run's folder in the second epoch."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 22:
            shutil.rmtree(lightbase.run_folder(trainer))


# TensorBoard's thread reports that its file has gone
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_folder_is_removed_ends_with_two_lines(train, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train("--trainer.callbacks test_run.RemovesFolder")
    error = capsys.readouterr().err.partition("error: ")[2]
    folder = tmp_path / "tiny" / "version_0"
    assert error == (
        f"{folder} is gone: it was removed while the run trained\nstart the run again\n"
    )
