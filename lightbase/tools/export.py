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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightbase.cli.script import ScriptParser, output_file, short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.data.module import BaseDataModule, shape_of_images
from lightbase.errors import UserError, first_line
from lightbase.folder import write_whole
from lightbase.module import BaseModule
from lightbase.resume.load import load_run

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


class Predictor(nn.Module):
    """What predict_step returns for inputs (N, ...), which are normalised first."""

    def __init__(self, model: LightningModule, normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model.eval()
        self.normalize = normalize
        self.takes_pairs = is_overridden(
            "predict_step", model
        )  # Lightning's own hands its argument to forward

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.normalize(inputs)
        return self.model.predict_step((inputs, None) if self.takes_pairs else inputs, 0)  # type: ignore[no-any-return]


class Subject(NamedTuple):
    predictor: Predictor
    batches: list[tuple[Tensor, Tensor]]  # inputs, and the outputs that a file has to give for them
    names: tuple[str, str]  # of input and output
    about: dict[str, Any]  # what a file tells of itself

    @property
    def net(self) -> str:
        model = self.predictor.model
        return type(model.net if isinstance(model, BaseModule) else model).__name__


@torch.no_grad()
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
    net = model.net if isinstance(model, BaseModule) else model
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


SIZES = (3, 1, 8)  # of the batches to check with; a graph is made with the first


def make_subject(model: LightningModule, data: LightningDataModule, raw: bool | None) -> Subject:
    """raw: whether inputs are as the data module loads them, or as the network takes them; None: as
    far as is known.

    Raises UserError where it is not known what they are, or where predict_step gives nothing to
    compare.
    """
    name, ours = type(model).__name__, data if isinstance(data, BaseDataModule) else None
    if not (is_overridden("predict_step", model) or is_overridden("forward", model)):
        raise UserError(f"{name} has neither predict_step nor forward: it predicts nothing")
    if raw and ours is None:
        raise UserError(
            f"--raw true: what {type(data).__name__} does to its samples is not known; leave "
            "it out",
            2,
        )
    raw = ours is not None and raw is not False
    normalize: Callable[[Tensor], Tensor] = ours.normalize if ours else nn.Identity()
    inputs = random_batches(example(model, data), model, normalize)
    if not raw:
        inputs, normalize = [normalize(batch) for batch in inputs], nn.Identity()
    predictor = Predictor(model, normalize)
    batches = [(batch, predictor(batch)) for batch in inputs]
    if any(not isinstance(y, Tensor) or y.shape[:1] != x.shape[:1] for x, y in batches):
        raise UserError(f"predict_step of {name} has to return a tensor with a row for each input")
    x, y = batches[0]
    classes = ours.classes if ours else []
    are_probabilities = bool(classes) and all(
        holds_probabilities(outputs, len(classes)) for _, outputs in batches
    )
    what = (
        "the probability of each class"
        if are_probabilities
        else f"what predict_step of {name} returns"
    )
    about = {
        "input": f"{describe(x)}, {'as loaded' if raw else 'normalised'}",
        "output": f"{describe(y)}, {what}",
        "input_shape": list(x.shape[1:]),
        "input_dtype": str(x.dtype).removeprefix("torch."),
        "raw": raw,
        "classes": classes,
        "torch": torch.__version__,
    }
    are_images = ours and (ours.image_shape or shape_of_images(ours.empty_batch))
    names = (
        "images" if are_images else "inputs",
        "probabilities" if are_probabilities else "prediction",
    )
    return Subject(predictor, batches, names, about)


def holds_probabilities(outputs: Tensor, num_classes: int) -> bool:
    if outputs.dim() != 2 or outputs.shape[1] < num_classes:
        return False
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), torch.ones(len(outputs)))


def describe(batch: Tensor) -> str:
    return (
        f"{str(batch.dtype).removeprefix('torch.')} "
        f"({', '.join(['N', *map(str, batch.shape[1:])])})"
    )


def example(model: LightningModule, data: LightningDataModule) -> Tensor:
    """A batch of inputs, which may be empty: as the data module loads them, or as the network takes
    them of others."""
    name = type(data).__name__
    if not isinstance(data, BaseDataModule):
        if isinstance(model.example_input_array, Tensor):
            return model.example_input_array
        what = f"what the network takes of {name} is not known"
        raise UserError(
            f"{what}\nset self.example_input_array of {type(model).__name__} to such a "
            "tensor, (N, ...)"
        )
    if data.empty_batch is None:  # the checkpoint does not know it
        data.prepare_data()
        data.setup("fit")
    if data.empty_batch is None:
        raise UserError(
            f"the samples of {name} are no tensors, and such a file takes one tensor; "
            "--format pth does not"
        )
    return data.empty_batch


def random_batches(
    like: Tensor, model: LightningModule, normalize: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Of the SIZES: images over all values, words that the network knows, numbers that it sees as
    normal ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, *like.shape[1:]) for size in SIZES]
    if not like.is_floating_point():
        embeddings = [
            module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
        ]
        num_values = 256 if shape_of_images(like) else min(embeddings, default=2)
        return [
            torch.randint(num_values, shape, generator=generator).to(like.dtype) for shape in shapes
        ]
    batches = [torch.randn(shape, generator=generator).to(like.dtype) for shape in shapes]
    zero, one = (normalize(torch.full_like(batches[0], value))[:1] for value in (0, 1))
    if zero.shape != batches[0][:1].shape:  # it makes something else of them
        return batches
    return [torch.where(one == zero, batch, (batch - zero) / (one - zero)) for batch in batches]
