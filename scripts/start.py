"""The first import of each script. It tells what is missing if the environment is not
the one that README.md installs, and lets Ctrl-C end the first imports without a
traceback.

Older versions of Python read this file, too, so it has no syntax newer than 3.9.
"""

import sys

__all__ = ["starting"]

try:
    from lightbase.commands.script import starting
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error}\nactivate the environment (source .venv/bin/activate), "
        "or type pip install -c constraints.txt -e ."
    )
except KeyboardInterrupt:
    sys.stderr.write("Stopped by Ctrl-C\n")
    sys.exit(130)
