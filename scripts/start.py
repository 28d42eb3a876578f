"""The start of each script. It says what is missing if the environment is not the one
that README.md installs, and lets Ctrl-C end the imports without a traceback.

Older versions of Python read this file, too, so it has no syntax newer than 3.9.
"""

import os
import signal
import sys


def run(command):
    """Run a command of the library, such as "commands.train"."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    try:
        from lightbase.commands.script import run_command
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}\nactivate the environment (source .venv/bin/activate), "
            'or type pip install -c constraints.txt -e ".[tools]"'
        )
    run_command(command)


def stop(*_):
    """End this process at once. An import of torch may catch an exception."""
    os.write(2, b"Stopped by Ctrl-C\n")
    os._exit(130)
