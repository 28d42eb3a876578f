"""Write a trained network to a file that other programs load.

python scripts/export.py --ckpt_path logs/cifar10_cnn/version_0/checkpoints/best.ckpt --format onnx
python scripts/export.py --ckpt_path ... --format pt2 --output cifar10.pt2
python scripts/export.py --ckpt_path logs/mnist_mlp/version_0/checkpoints/best.ckpt --format pth
--output mnist.pth

onnx, for ONNX Runtime, and pt2, for torch.export.load of plain PyTorch, hold the network and what
stands around it: from images as files have them, uint8 (N, C, H, W), or other samples as the data
module loads them, to what predict_step returns, in batches of any size. With --raw false they take
what the network takes, normalised already. pth: a plain state_dict.
`net.load_state_dict(torch.load("mnist.pth", weights_only=True))` needs plain PyTorch only.

A file that does not give what the checkpoint gives is not kept. docs/export.md shows how to use
each.
"""

import contextlib
import importlib.util
import io
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from project.engine.script import ScriptParser, output_file, short_errors, starting, write_whole

with starting():
    import torch
    from exporting import Subject, describe, make_subject
    from lightning import LightningModule
    from torch import Tensor
    from torch.export import Dim, ExportedProgram

    from project.base.errors import UserError, first_line
    from project.base.system import System
    from project.engine.cli import TrainingCLI
    from project.engine.quiet import quiet_lightning
    from project.engine.resume import load_run

FORMATS = ("onnx", "pt2", "pth")
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
MAX_ONNX_BYTES = 2e9  # in one file
# torch to itself: of recurrent networks (pytorch pull request 163809), of calls to give up
# (169400), and in torch 2.11 of the memory that a pt2 file is read from
CHATTER = (
    r"The tensor attributes .*_flat_weights|_check_is_size will be removed|The given "
    r"buffer is not writable"
)


def main(args: Sequence[str] | None = None) -> Path:
    parser = ScriptParser(description=__doc__)
    parser.add_checkpoint_arguments()
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="what to write; unless given what --output ends with, or pth",
    )
    parser.add_argument(
        "--output", type=output_file, help="the file; beside the checkpoint unless given"
    )
    parser.add_argument(
        "--raw", choices=("true", "false"), help="false: the file takes inputs that are normalised"
    )
    with short_errors():
        known = parser.parse_args(args)
        quiet_lightning()
        ending = known.output.suffix.removeprefix(".").lower() if known.output else ""
        if not known.format and ending not in ("", "pt", *FORMATS):
            raise UserError(
                f"--output {known.output}: {ending} is no format; give --format "
                f"{', '.join(FORMATS)}",
                2,
            )
        kind = known.format or (ending if ending in FORMATS else "pth")
        if ending in FORMATS and ending != kind:
            raise UserError(
                f"--output {known.output} and --format {kind} are two formats: leave one of "
                "them out",
                2,
            )
        if kind == "pth" and known.raw:
            raise UserError(
                f"--raw {known.raw}: pth holds the weights alone; give --format onnx or pt2", 2
            )
        if kind == "onnx" and (
            missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        ):
            raise UserError(
                f'--format onnx needs {", ".join(missing)}: pip install -e ".[export]"', 2
            )
        run = load_run(known.ckpt_path, is_trusted=known.trust_checkpoint == "true")
        output: Path = known.output or known.ckpt_path.with_suffix(f".{kind}")
        if output.resolve() == known.ckpt_path.resolve():
            raise UserError(f"--output {output} is the checkpoint itself; give another file", 2)
        if kind == "pth":
            content, said = checked_weights(run.model)
        else:
            subject = make_subject(
                run.model, run.datamodule, None if known.raw is None else known.raw == "true"
            )
            subject.about.update(run=name_of(run, known.ckpt_path), checkpoint=known.ckpt_path.name)
            content, said = checked_graph(subject, kind)
        write_whole(output, content)
    print(f"{said}: {output}")
    return output


def name_of(run: TrainingCLI, checkpoint: Path) -> str:
    """NAME/version_N, or NAME where the checkpoint lies in no run's folder."""
    folder = checkpoint.resolve().parent.parent.name
    return f"{run.config.name}/{folder}" if folder.startswith("version_") else str(run.config.name)


def checked_weights(model: LightningModule) -> tuple[bytes, str]:
    """A file with a plain state_dict of the network, which equals the checkpoint's bit for bit, and
    what to say."""
    net = model.net if isinstance(model, System) else model
    own = net.state_dict()
    buffer = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in own.items()}, buffer)
    content = buffer.getvalue()
    saved = torch.load(io.BytesIO(content), weights_only=True)
    if saved.keys() != own.keys() or any(
        not torch.equal(saved[name], own[name].cpu()) for name in own
    ):
        raise RuntimeError("torch.load does not give the weights that torch.save was given")
    return content, f"Weights of {type(net).__name__}, checked to be those of the checkpoint"


@torch.no_grad()
def checked_graph(subject: Subject, kind: str) -> tuple[bytes, str]:
    """A file with the graph and its weights, which gives the checkpoint's outputs, and what to
    say."""
    warnings.filterwarnings("ignore", message=CHATTER)
    content = as_onnx(subject) if kind == "onnx" else as_pt2(subject)
    inputs = [x for x, _ in subject.batches]
    difference = largest_difference(
        subject, run_onnx(content, inputs) if kind == "onnx" else run_pt2(content, inputs)
    )
    x, y = subject.batches[0]
    what = f"{subject.net}, {subject.names[0]} {describe(x)} to {subject.names[1]} {describe(y)}"
    return content, f"{what}, checked to be the checkpoint's, at most {difference:.1g} off"


def trace(subject: Subject) -> ExportedProgram:
    """Raises UserError where what the network does depends on the numbers in its inputs, or on the
    size of a batch."""
    shapes, reasons, heard = ({0: Dim("batch")},), [], io.StringIO()
    for strict in (
        False,
        True,
    ):  # the first takes more of Python; to the second the len of a tensor may vary
        logging.disable()  # at length, where it fails
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                contextlib.redirect_stderr(heard),
            ):  # of compiled parts
                inputs = (subject.batches[0][0],)
                program = torch.export.export(
                    subject.predictor, inputs, dynamic_shapes=shapes, strict=strict
                )
        except Exception as error:  # without torch.export it has taken these inputs
            reasons.append(first_line(error).partition(" For more information")[0])
            continue
        finally:
            logging.disable(logging.NOTSET)
        print(heard.getvalue(), end="", file=sys.stderr)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # names folders of this machine
        return program
    what = f"{subject.net} cannot be exported as one graph for batches of any size"
    raise UserError(f"{what}\ntorch.export: {'; in strict mode: '.join(dict.fromkeys(reasons))}")


def as_pt2(subject: Subject) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(
        trace(subject), buffer, extra_files={"metadata.json": json.dumps(subject.about, indent=2)}
    )
    return buffer.getvalue()


def as_onnx(subject: Subject) -> bytes:
    num_bytes = sum(value.nbytes for value in subject.predictor.state_dict().values())
    if num_bytes > MAX_ONNX_BYTES:
        raise UserError(
            f"the weights have {num_bytes / 1e9:.1f} GB, and an ONNX file holds 2: export "
            "--format pt2"
        )
    program = trace(subject)
    names: Any = {
        "input_names": subject.names[:1],
        "output_names": subject.names[1:],
        "dynamic_shapes": ({0: "batch"},),
    }
    try:
        found = torch.onnx.export(program, dynamo=True, external_data=False, verbose=False, **names)
    except Exception as error:
        while isinstance(error.__cause__, Exception):  # its own message is advice
            error = error.__cause__
        raise UserError(
            f"{subject.net} cannot be written as ONNX; --format pt2 may do\n{first_line(error)}"
        ) from error
    assert found is not None
    about = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in subject.about.items()
    }
    found.model.metadata_props.update(about)
    return found.model_proto.SerializeToString()


def run_onnx(content: bytes, inputs: list[Tensor]) -> list[Tensor]:
    from onnxruntime import InferenceSession

    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    (name,) = (found.name for found in session.get_inputs())
    return [torch.from_numpy(session.run(None, {name: batch.numpy()})[0]) for batch in inputs]


def run_pt2(content: bytes, inputs: list[Tensor]) -> list[Tensor]:
    net = torch.export.load(io.BytesIO(content)).module()
    return [net(batch) for batch in inputs]


def largest_difference(subject: Subject, found: list[Tensor]) -> float:
    """Of a file's outputs from the checkpoint's, as a part of 1, or of the largest output if that
    is more.

    Raises UserError where it is more than TOLERANCE.
    """
    worst = 0.0
    for (inputs, expected), outputs in zip(subject.batches, found, strict=True):
        is_same = (expected == outputs) | (expected.isnan() & outputs.isnan())
        largest = max(1.0, expected.double().nan_to_num(posinf=0, neginf=0).abs().max().item())
        difference = (expected.double() - outputs.double()).abs().masked_fill(
            is_same, 0
        ).max().item() / largest
        if not difference <= TOLERANCE:  # NaN neither
            what = (
                f"its outputs for {len(inputs)} random inputs are {difference:.1e} off the "
                "checkpoint's"
            )
            raise UserError(f"the export of {subject.net} is wrong and was not kept: {what}")
        worst = max(worst, difference)
    return worst


if __name__ == "__main__":
    main()
