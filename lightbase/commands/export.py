"""Write a trained network to a file that other programs load."""

from collections.abc import Sequence
from pathlib import Path

from lightbase.commands import arguments
from lightbase.commands.checkpoint import open_checkpoint
from lightbase.commands.script import short_errors
from lightbase.core.errors import UserError
from lightbase.core.files import write_whole
from lightbase.core.module import BaseModule
from lightbase.extras.export import graph_file, weights_file


def main(args: Sequence[str] | None = None) -> Path:
    """Write the file, and return its path.

    args: The arguments of the script; those of the process if not given.
    """
    with short_errors():
        options, flags = arguments.export().read(args)
        checkpoint, suffix = options.ckpt_path, f".{options.format}"
        output: Path = options.output or checkpoint.with_suffix(suffix)
        if output.suffix != suffix or output.resolve() == checkpoint.resolve():
            way_out = f"give another {suffix} file, or --format"
            raise UserError(f"--output {output}: {way_out}", status=2)
        _, model, data = open_checkpoint(options, flags)
        print(f"Exporting {checkpoint}", flush=True)
        net = model.net if isinstance(model, BaseModule) else model
        if options.format == "pth":
            content, note = weights_file(net), "weights"
        else:
            content, difference = graph_file(model, data, options.format)
            note = f"outputs at most {difference:.1g} off the checkpoint's"
        write_whole(output, content)
        print(f"{type(net).__name__}, {note}: {output}")
    return output
