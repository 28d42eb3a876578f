"""One device and many; several steps a call; signals."""
