"""A PyTorch Lightning project template. Start reading at classifier.py, then base/system.py and
base/datamodule.py."""
