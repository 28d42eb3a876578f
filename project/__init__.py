"""A PyTorch Lightning project template. Start reading at classifier.py, then data/datamodule.py, then cli.py."""
