"""Checkpoints, and going on from one."""
