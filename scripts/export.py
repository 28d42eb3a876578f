"""Write the network's weights to a file that other programs load.

python scripts/export.py --ckpt_path logs/mnist_mlp/version_0/checkpoints/best.ckpt --format pth --output mnist.pth

pth: a plain state_dict. `net.load_state_dict(torch.load("mnist.pth", weights_only=True))` needs plain PyTorch only.
"""

import io
from collections.abc import Sequence
from pathlib import Path

from project.engine.script import ScriptParser, output_file, short_errors  # isort: skip  # first: it hears Ctrl-C

import torch
from torch import nn

from project.base.errors import UserError
from project.base.system import System
from project.engine.quiet import quiet_lightning
from project.engine.resume import load_run


def main(args: Sequence[str] | None = None) -> Path:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="a run's checkpoint, best.ckpt for instance")
    parser.add_argument("--format", choices=["pth"], default="pth", help="what to write")
    parser.add_argument("--output", type=output_file, help="the file; beside the checkpoint unless given")
    with short_errors():
        known = parser.parse_args(args)
        quiet_lightning()
        output: Path = known.output or known.ckpt_path.with_suffix(f".{known.format}")
        model = load_run(known.ckpt_path).model
        net = model.net if isinstance(model, System) else model
        if output.resolve() == known.ckpt_path.resolve():
            raise UserError(f"--output {output} is the checkpoint itself; give another file", 2)
        # written beside the target and moved there, so that an earlier file survives a full disk
        staged = output.with_name(f".{output.name}.part")
        try:
            staged.write_bytes(content(net))
            check(staged, net)
            staged.replace(output)
        finally:
            staged.unlink(missing_ok=True)
    print(f"Weights of {type(net).__name__}, checked to be those of the checkpoint: {output}")
    return output


def content(net: nn.Module) -> bytes:
    """The weights as torch.save writes them."""
    buffer = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in net.state_dict().items()}, buffer)
    return buffer.getvalue()


def check(file: Path, net: nn.Module) -> None:
    """Raise RuntimeError unless the file holds the network's weights, bit for bit."""
    saved = torch.load(file, weights_only=True)
    own = net.state_dict()
    if saved.keys() != own.keys() or any(not torch.equal(saved[name], own[name].cpu()) for name in own):
        raise RuntimeError(f"{file} does not hold the weights that were written to it")


if __name__ == "__main__":
    main()
