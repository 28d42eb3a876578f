"""Data sets, one file each, over what they share in datamodule.py."""
