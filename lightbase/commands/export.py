"""Write a trained network to a file that other programs load.

This file reads the flags and writes the result. The formats are in
lightbase/extras/export.py.
"""

from pathlib import Path

from lightbase.commands import arguments
from lightbase.commands.checkpoint import open_checkpoint
from lightbase.commands.script import short_errors
from lightbase.core.errors import UserError
from lightbase.core.files import write_whole
from lightbase.core.module import BaseModule
from lightbase.extras.export import graph_file, weights_file


def main(args: arguments.Args = None) -> Path:
    """Write the file, print what it holds, and return its path.

    Without --output the file lies beside the checkpoint: best.ckpt gives best.pth,
    best.onnx or best.pt2. An existing file is replaced.

    args: The arguments of the script.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    with short_errors():
        options, flags = arguments.export().read(args)
        checkpoint = options.ckpt_path
        suffix = f".{options.format}"
        output: Path = options.output or checkpoint.with_suffix(suffix)
        if output.suffix != suffix or output.resolve() == checkpoint.resolve():
            raise UserError(
                f"--output {output}: give another {suffix} file, or --format", status=2
            )
        _, model, data = open_checkpoint(options, flags)
        net = model
        if isinstance(model, BaseModule):
            net = model.net
        if options.format == "pth":
            content = weights_file(net)
            note = "weights"
        else:
            content, difference = graph_file(model, data, options.format)
            note = f"outputs at most {difference:.1g} off the checkpoint's"
        write_whole(output, content)
        print(f"{type(net).__name__}, {note}: {output}")
    return output
