"""What classifier.py, data/ and callbacks/ derive from: to read when something surprises you."""
