"""Errors of jsonargparse in one line. test_cli.py has those of real commands."""

from lightbase.config.parser import Parser, meant


def test_no_setting_is_proposed_in_its_own_place() -> None:
    proposal = meant("data.num_workers", Parser(), {"data": "torch.nn.Identity"})
    assert proposal == ""
