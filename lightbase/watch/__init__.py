"""Callbacks that watch a training and change nothing in it."""
