"""What the commands in scripts/ call."""
