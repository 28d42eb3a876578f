"""The first import of each script. It tells what is missing if the environment is not
the one that README.md installs, and lets Ctrl-C end the imports at once.

Older versions of Python read this file, too, so it has no syntax newer than 3.9.
"""

import contextlib
import os
import signal
import sys

INSTALL = "pip install -c constraints.txt -e ."


@contextlib.contextmanager
def starting(script, default_model):
    """Do what `starting` in lightbase/commands/script.py does, also if that file cannot
    be imported. The library in this repository comes before an installed one."""
    is_command = vars(sys.modules["__main__"]).get("__file__") == script
    # under nohup the signal stays ignored
    if is_command and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    if sys.version_info < (3, 11):  # noqa: UP036
        version = sys.version.split()[0]
        sys.exit(
            f"error: Python 3.11 or newer is needed, and this is {version}\n"
            f"python3.11 -m venv .venv && source .venv/bin/activate && {INSTALL}"
        )
    sys.path.insert(1, __file__.rpartition("scripts")[0])
    try:
        from lightbase.commands import script as library

        with library.starting(script, default_model):
            yield
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}\n"
            f"activate the environment (source .venv/bin/activate), or type {INSTALL}"
        )


def stop(*_):
    """End this process. An exception would end in a traceback of the package that is
    imported just then."""
    os.write(2, b"Stopped by Ctrl-C\n")
    os._exit(130)
