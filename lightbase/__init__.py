"""A library for training with PyTorch Lightning: what a project derives from, and its
tools.

`__init__.pyi` lists the public names. Each is imported on first use: torch takes
seconds to import, and scripts answer --help before.
"""

import lazy_loader

__version__ = "0.4.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
