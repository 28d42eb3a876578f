"""One training, from its command line to its test result."""
