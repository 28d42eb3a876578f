"""Write a trained network to a file that other programs load.

python scripts/export.py --ckpt_path logs/cifar10_cnn/version_0/checkpoints/best.ckpt --format onnx
python scripts/export.py --ckpt_path ... --format pt2 --output cifar10.pt2
python scripts/export.py --ckpt_path ... --format pth --output mnist.pth

onnx is for ONNX Runtime, pt2 for torch.export.load of plain PyTorch. Both hold all that predict.py
computes: from samples as the data module loads them, such as uint8 images (N, C, H, W), to what
predict_step returns, in batches of any size. pth is a plain state_dict of the network:
`net.load_state_dict(torch.load("mnist.pth", weights_only=True))`.

A file that does not give the outputs of the checkpoint is not kept. docs/export.md shows how to use
each format.
"""

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightbase.cli.script import ScriptParser, output_file, short_errors
from lightbase.compat import quiet_lightning
from lightbase.data.module import BaseDataModule, shape_of_images
from lightbase.errors import UserError, first_line
from lightbase.folder import write_whole
from lightbase.module import BaseModule
from lightbase.resume.load import load_run
from lightbase.tools.predict import Predictor

FORMATS = ("onnx", "pt2", "pth")
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
BATCH_SIZES = (3, 1, 8)  # of the batches for the check; the first is traced
# torch warns itself: of recurrent networks (pytorch pull request 163809), of calls that it gives up
# (169400), and in torch 2.11 of the memory that a pt2 file is read from
CHATTER = (
    r"The tensor attributes .*_flat_weights|_check_is_size will be removed|"
    r"The given buffer is not writable"
)


def main(args: Sequence[str] | None = None) -> Path:
    """Returns the path of the file."""
    parser = ScriptParser(description=__doc__)
    parser.add_checkpoint_arguments()
    parser.add_argument(
        "--format", choices=FORMATS, help="unless given the suffix of --output, or pth"
    )
    parser.add_argument(
        "--output", type=output_file, help="the file; beside the checkpoint unless given"
    )
    with short_errors():
        options = parser.parse_args(args)
        quiet_lightning()
        kind = options.format or format_of(options.output)
        if kind == "onnx":
            check_packages()
        checkpoint: Path = options.ckpt_path
        run = load_run(checkpoint, is_trusted=options.trust_checkpoint == "true")
        output: Path = options.output or checkpoint.with_suffix(f".{kind}")
        if output.resolve() == checkpoint.resolve():
            raise UserError(f"--output {output} is the checkpoint itself; give another file", 2)
        if kind == "pth":
            write_whole(output, weights(run.model))
            print(f"Weights of {network_name(run.model)}: {output}")
            return output
        job = make_job(run.model, run.datamodule)
        folder = checkpoint.resolve().parent.parent.name
        is_in_run = folder.startswith("version_")
        job.about["run"] = f"{run.config.name}/{folder}" if is_in_run else run.config.name
        job.about["checkpoint"] = checkpoint.name
        content, difference = checked_graph(job, kind)
        write_whole(output, content)
        inputs, outputs = job.batches[0]
        what = f"{job.input_name} {describe(inputs)} to {job.output_name} {describe(outputs)}"
        print(f"{network_name(run.model)}, {what}, at most {difference:.1g} off: {output}")
    return output


def format_of(output: Path | None) -> str:
    suffix = output.suffix.removeprefix(".").lower() if output else ""
    if suffix in ("", "pt"):
        return "pth"
    if suffix not in FORMATS:
        what = f"--output {output}: {suffix} is no format"
        raise UserError(f"{what}; give --format {', '.join(FORMATS)}", 2)
    return suffix


def check_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        what = f"--format onnx needs {', '.join(missing)}"
        raise UserError(f'{what}: pip install -e ".[export]"', 2)


def network(model: LightningModule) -> nn.Module:
    return model.net if isinstance(model, BaseModule) else model


def network_name(model: LightningModule) -> str:
    return type(network(model)).__name__


def weights(model: LightningModule) -> bytes:
    """A file with the state_dict of the network."""
    buffer = io.BytesIO()
    state = network(model).state_dict()
    torch.save({name: value.detach().cpu() for name, value in state.items()}, buffer)
    return buffer.getvalue()


@dataclass
class Job:
    """What a file computes, and how it is checked and described."""

    predictor: Predictor
    batches: list[tuple[Tensor, Tensor]]  # inputs, and the outputs of the checkpoint for them
    input_name: str
    output_name: str
    about: dict[str, Any]  # the metadata of the file

    @property
    def net(self) -> str:
        return network_name(self.predictor.model)


def make_job(model: LightningModule, data: LightningDataModule) -> Job:
    """Raises UserError if the inputs have no known shape, or predict_step returns no tensor."""
    classes: list[str] = []
    normalize: Callable[[Tensor], Tensor] = nn.Identity()
    has_images = False
    if isinstance(data, BaseDataModule):
        classes, normalize = data.classes, data.normalize
        has_images = data.image_shape is not None or shape_of_images(data.empty_batch) is not None
    predictor = Predictor(model, normalize)
    inputs = random_batches(example(model, data), model, normalize)
    batches = [(batch, predictor.predict(batch)) for batch in inputs]
    x, y = batches[0]
    are_probabilities = all(holds_probabilities(outputs, len(classes)) for _, outputs in batches)
    meaning = f"what predict_step of {type(model).__name__} returns"
    if are_probabilities:
        meaning = "the probability of each class"
    is_raw = isinstance(data, BaseDataModule)
    about = {
        "input": f"{describe(x)}, {'as loaded' if is_raw else 'as the network takes it'}",
        "output": f"{describe(y)}, {meaning}",
        "input_shape": list(x.shape[1:]),
        "input_dtype": str(x.dtype).removeprefix("torch."),
        "raw": is_raw,
        "classes": classes,
        "torch": torch.__version__,
    }
    input_name = "images" if has_images else "inputs"
    output_name = "probabilities" if are_probabilities else "prediction"
    return Job(predictor, batches, input_name, output_name, about)


def example(model: LightningModule, data: LightningDataModule) -> Tensor:
    """A batch of inputs, which may be empty."""
    name = type(data).__name__
    if not isinstance(data, BaseDataModule):
        if isinstance(model.example_input_array, Tensor):
            return model.example_input_array
        raise UserError(
            f"what the network takes of {name} is not known\nset self.example_input_array of "
            f"{type(model).__name__} to such a tensor, (N, ...)"
        )
    if data.empty_batch is None:  # a checkpoint of version 0.1 does not have it either
        what = f"the samples of {name} are no tensors, or the checkpoint does not know their shape"
        raise UserError(f"{what}\n--format pth needs neither")
    return data.empty_batch


def random_batches(
    like: Tensor, model: LightningModule, normalize: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Batches of BATCH_SIZES with values as the network may see them.

    Images have all values. Other integers are indices of the smallest embedding. Floats are
    standard normal after `normalize`; far from that, a probability of 1 would agree with anything.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, *like.shape[1:]) for size in BATCH_SIZES]
    if not like.is_floating_point():
        embeddings = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        num_values = 256 if shape_of_images(like) else min(embeddings, default=2)
        batches = [torch.randint(num_values, shape, generator=generator) for shape in shapes]
        return [batch.to(like.dtype) for batch in batches]
    batches = [torch.randn(shape, generator=generator).to(like.dtype) for shape in shapes]
    zero = normalize(torch.zeros_like(batches[0]))[:1]
    one = normalize(torch.ones_like(batches[0]))[:1]
    if zero.shape != batches[0][:1].shape:  # `normalize` changes more than the scale
        return batches
    return [torch.where(one == zero, batch, (batch - zero) / (one - zero)) for batch in batches]


def holds_probabilities(outputs: Tensor, num_classes: int) -> bool:
    if not num_classes or outputs.dim() != 2 or outputs.shape[1] < num_classes:
        return False
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), torch.ones(len(outputs)))


def describe(batch: Tensor) -> str:
    shape = ", ".join(["N", *map(str, batch.shape[1:])])
    return f"{str(batch.dtype).removeprefix('torch.')} ({shape})"


@torch.no_grad()
def checked_graph(job: Job, kind: str) -> tuple[bytes, float]:
    """A file with the graph and its weights, and the largest difference of its outputs."""
    warnings.filterwarnings("ignore", message=CHATTER)
    write, run = (as_onnx, run_onnx) if kind == "onnx" else (as_pt2, run_pt2)
    content = write(job)
    outputs = run(content, [inputs for inputs, _ in job.batches])
    pairs = zip(job.batches, outputs, strict=True)
    differences = [difference(actual, expected) for (_, expected), actual in pairs]
    # NaN, which is not equal to itself, is refused
    for size, value in zip(BATCH_SIZES, differences, strict=True):
        if not value <= TOLERANCE:
            what = f"its outputs for {size} random inputs are {value:.1e} off the checkpoint's"
            raise UserError(f"the export of {job.net} is wrong and was not kept: {what}")
    return content, max(differences)


def difference(outputs: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of 1, or of the largest finite output if that is more."""
    largest = expected.nan_to_num(posinf=0, neginf=0).abs().max().item()
    differences = (outputs.double() - expected.double())[outputs != expected].abs()
    return differences.max().item() / max(1.0, largest) if len(differences) else 0.0


def trace(job: Job) -> ExportedProgram:
    """Raises UserError if the network branches on numbers in its inputs or on the batch size."""
    reasons = []
    inputs = (job.batches[0][0],)
    # not strict takes more of Python; strict allows `len(x)` of a batch
    for strict in (False, True):
        logging.disable()  # torch logs and prints a failure at length
        try:
            # a compiled part is traced as its plain network
            eager = torch.compiler.set_stance("force_eager")
            with eager, contextlib.redirect_stderr(io.StringIO()):
                program = torch.export.export(
                    job.predictor, inputs, dynamic_shapes=({0: Dim("batch")},), strict=strict
                )
        except Exception as error:  # of many types; the predictor itself has taken these inputs
            reasons.append(first_line(error).partition(" For more information")[0])
            continue
        finally:
            logging.disable(logging.NOTSET)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # names folders of this machine
        return program
    what = f"{job.net} cannot be exported as one graph for batches of any size"
    raise UserError(f"{what}\ntorch.export: {'; in strict mode: '.join(dict.fromkeys(reasons))}")


def as_pt2(job: Job) -> bytes:
    buffer = io.BytesIO()
    metadata = {"metadata.json": json.dumps(job.about, indent=2)}
    torch.export.save(trace(job), buffer, extra_files=metadata)
    return buffer.getvalue()


def run_pt2(content: bytes, batches: list[Tensor]) -> list[Tensor]:
    net = torch.export.load(io.BytesIO(content)).module()
    return [net(batch) for batch in batches]


def as_onnx(job: Job) -> bytes:
    program = trace(job)
    try:
        onnx: Any = torch.onnx.export(
            program,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=[job.input_name],
            output_names=[job.output_name],
            dynamic_shapes=({0: "batch"},),
        )
    except Exception as error:
        # the message of the outer error is advice
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        what = f"{job.net} cannot be written as ONNX; --format pt2 may do"
        raise UserError(f"{what}\n{first_line(cause)}") from error
    for key, value in job.about.items():
        onnx.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
    content: bytes = onnx.model_proto.SerializeToString()
    return content


def run_onnx(content: bytes, batches: list[Tensor]) -> list[Tensor]:
    from onnxruntime import InferenceSession

    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [torch.from_numpy(session.run(None, {name: batch.numpy()})[0]) for batch in batches]
