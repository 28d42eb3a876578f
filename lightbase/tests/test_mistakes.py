"""Errors of jsonargparse in one line. test_cli.py has those of real commands."""

from lightbase.config.parser import Parser, in_plain_words, meant


def test_a_proposal_is_for_the_name_that_was_typed(monkeypatch):
    classes = ["project.data.mnist.MNIST"]
    monkeypatch.setattr("lightbase.config.parser.users_classes", lambda: classes)
    reason = "Expected a dot import path string: {} or list"
    assert "did you" not in in_plain_words(reason.format("TorchCheckpointI0"), "")
    assert in_plain_words(reason.format("MNITS"), "").endswith(
        "project.data.mnist.MNIST?"
    )


def test_no_setting_is_proposed_in_its_own_place() -> None:
    proposal = meant("data.num_workers", Parser(), {"data": "torch.nn.Identity"})
    assert proposal == ""
