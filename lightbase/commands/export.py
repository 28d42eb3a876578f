"""Write a trained network to a file that other programs load."""

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightbase.commands import arguments
from lightbase.commands.script import short_errors
from lightbase.core.batches import for_network
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, first_line
from lightbase.core.folder import write_whole
from lightbase.core.module import BaseModule
from lightbase.core.resume import load_run

TOLERANCE = 1e-4
BATCH_SIZES = (3, 1, 8)  # of the batches for the check; the first is traced

Graph = tuple[
    bytes, Callable[[Tensor], Tensor]
]  # a file's content, and what runs it on a batch


def main(args: Sequence[str] | None = None) -> Path:
    """Returns the path of the file."""
    with short_errors():
        options, flags = arguments.export().read(args)
        quiet_lightning()
        kind, checkpoint = options.format, options.ckpt_path
        output: Path = options.output or checkpoint.with_suffix(f".{kind}")
        if output.suffix != f".{kind}" or output.resolve() == checkpoint.resolve():
            raise UserError(
                f"--output {output}: give another .{kind} file, or --format", status=2
            )
        run = load_run(checkpoint, flags, options.trust)
        print(f"Exporting {checkpoint}", flush=True)
        net = run.model.net if isinstance(run.model, BaseModule) else run.model
        if kind == "pth":
            buffer, text = io.BytesIO(), "weights"
            torch.save(
                {name: x.detach().cpu() for name, x in net.state_dict().items()}, buffer
            )
            content = buffer.getvalue()
        else:
            content, difference = graph_file(run.model, run.datamodule, kind)
            text = f"outputs at most {difference:.1g} off the checkpoint's"
        write_whole(output, content)
        print(f"{type(net).__name__}, {text}: {output}")
    return output


@torch.no_grad()
def graph_file(
    model: LightningModule, data: LightningDataModule, kind: str
) -> tuple[bytes, float]:
    """A file with the graph and its weights, and its largest difference from the
    checkpoint. Raises UserError if there is no such graph, or if the file gives other
    outputs than the checkpoint."""
    ours = data if isinstance(data, BaseDataModule) else None
    like = ours.empty_batch if ours else model.example_input_array
    if not isinstance(like, Tensor):
        what = f"the inputs of {type(data).__name__} are no tensors of a known shape"
        way_out = f"set self.example_input_array of {type(model).__name__} to a tensor (N, ...)"
        raise UserError(what, f"{'--format pth needs none' if ours else way_out}")
    predictor = Predictor(model, ours.normalize if ours else nn.Identity())
    batches = random_batches(like)
    expected = [predictor(batch) for batch in batches]
    for outputs, batch in zip(expected, batches, strict=True):
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != batch.shape[:1]:
            what = f"predict_step of {type(model).__name__} has to return a tensor"
            raise UserError(f"{what} with a row for each input")
    # what torch logs and warns of during an export is long, and of no use
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        program = trace(predictor, batches[0])
        write = as_onnx if kind == "onnx" else as_pt2
        content, run_file = write(program, ours.classes if ours else [])
        outputs = [run_file(batch) for batch in batches]
    differences = []  # as parts of 1, or of the largest output if that is more
    for size, output, right in zip(BATCH_SIZES, outputs, expected, strict=True):
        largest = (output.double() - right.double()).abs().max().item()
        value = largest / max(1.0, right.abs().max().item())
        differences.append(value)
        if not value <= TOLERANCE:  # NaN is refused, too
            what = f"its outputs for {size} random inputs are {value:.1e} off the checkpoint's"
            raise UserError(f"the export is wrong and was not kept: {what}")
    return content, max(differences)


class Predictor(nn.Module):
    """From samples (N, ...) as the data module loads them to what predict_step
    returns."""

    def __init__(
        self, model: LightningModule, normalize: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.normalize = normalize
        # Lightning's own predict_step hands its argument to forward
        self.takes_batches = is_overridden("predict_step", model)

    def forward(self, samples: Tensor) -> Any:
        inputs = for_network(self.normalize(samples), self.model)
        return self.model.predict_step(
            (inputs, None) if self.takes_batches else inputs, 0
        )


def random_batches(like: Tensor) -> list[Tensor]:
    """Batches of BATCH_SIZES. Images have all values, other integers are 0 and 1, which
    are indices of any embedding. Floats are standard normal."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, *like.shape[1:]) for size in BATCH_SIZES]
    if like.is_floating_point():
        batches = [torch.randn(shape, generator=generator) for shape in shapes]
    else:
        high = 256 if like.dtype == torch.uint8 else 2
        batches = [torch.randint(high, shape, generator=generator) for shape in shapes]
    return [batch.to(like.dtype) for batch in batches]


def trace(predictor: Predictor, inputs: Tensor) -> ExportedProgram:
    """Raises UserError if the network branches on numbers in its inputs or on the batch
    size."""
    try:
        with torch.compiler.set_stance(
            "force_eager"
        ):  # traces a compiled part as it is written
            program = torch.export.export(
                predictor, (inputs,), dynamic_shapes=({0: Dim("batch")},), strict=False
            )
    except (
        Exception
    ) as error:  # of many types; the predictor itself has taken these inputs
        what = "the network cannot be exported as one graph for batches of any size"
        raise UserError(what, f"torch.export: {first_line(error)}") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names folders of this machine
    return program


def as_pt2(program: ExportedProgram, classes: list[str]) -> Graph:
    buffer = io.BytesIO()
    torch.export.save(
        program, buffer, extra_files={"classes.json": json.dumps(classes)}
    )
    return buffer.getvalue(), torch.export.load(io.BytesIO(buffer.getvalue())).module()


def as_onnx(program: ExportedProgram, classes: list[str]) -> Graph:
    try:
        import onnxscript  # noqa: F401  # torch.onnx needs it
        from onnxruntime import InferenceSession
    except ImportError as error:
        raise UserError(
            f'--format onnx: {error}: pip install -e ".[export]"', status=2
        ) from error
    try:
        onnx: Any = torch.onnx.export(
            program,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=["inputs"],
            output_names=["outputs"],
            dynamic_shapes=({0: "batch"},),
        )
        onnx.model.metadata_props["classes"] = json.dumps(classes)
        content = onnx.model_proto.SerializeToString()
        session = InferenceSession(content, providers=["CPUExecutionProvider"])
    except (
        Exception
    ) as error:  # of torch, or of ONNX Runtime: it has no convolution of float64
        # the message of the outer error is advice
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        what = "the network cannot be written as ONNX; --format pt2 may do"
        raise UserError(what, f"{first_line(cause)}") from error
    return content, lambda x: torch.from_numpy(
        session.run(None, {"inputs": x.numpy()})[0]
    )
