"""A PyTorch Lightning project template. Start reading at classifier.py, then data/datamodule.py, then cli.py."""

import os

# noted at once: when torch has been imported, seconds later, the process that started this one may be gone
STARTED_BY = os.getppid()
