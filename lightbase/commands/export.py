"""Write a trained network to a file that other programs load: its weights, or the graph
of all that predict.py computes. A graph file has to give the checkpoint's outputs for
random batches. See docs/export.md."""

import contextlib
import io
import json
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightbase.commands.checkpoint import open_checkpoint
from lightbase.config.errors import UserError, first_line
from lightbase.config.files import write_whole
from lightbase.data.module import BaseDataModule, in_units
from lightbase.data.tensors import for_network
from lightbase.model.module import BaseModule
from lightbase.model.predictions import prediction_step


def run(options: Namespace) -> Path:
    """Write the file, print what it holds, and return its path. Without --output the
    file lies beside the checkpoint."""
    checkpoint = options.ckpt_path
    suffix = f".{options.format}"
    output: Path = options.output or checkpoint.with_suffix(suffix)
    if output.suffix != suffix or output.resolve() == checkpoint.resolve():
        raise UserError(
            f"--output {output}: give another {suffix} file, or --format", status=2
        )
    _, model, data = open_checkpoint(options)
    net = model
    if isinstance(model, BaseModule):
        net = model.net
    if options.format == "pth":
        buffer = io.BytesIO()
        torch.save(net.state_dict(), buffer)
        content = buffer.getvalue()
        note = "weights"
    else:
        content, difference = graph_file(model, data, options.format)
        note = f"outputs at most {difference:.1g} off the checkpoint's"
    write_whole(output, content)
    print(f"{type(net).__name__}, {note}: {output}")
    return output


Written = tuple[bytes, Callable[[Tensor], Tensor]]
"""The content of a file, and a function that runs the file on a batch."""

TOLERANCE = 1e-4
"""The largest difference of two outputs, as a part of 1, or of the largest expected
output if that is more. So it is absolute for probabilities and relative for large
outputs."""

BATCH_SIZES = (3, 1)  # of the batches for the check; the first is traced


@torch.no_grad()
def graph_file(
    model: LightningModule, data: LightningDataModule, kind: str
) -> tuple[bytes, float]:
    """Return the content of a file with the graph and its weights, and the largest
    difference of its outputs from the checkpoint's.

    model, data: The file takes what a BaseDataModule loads. For other data it takes the
        inputs of the network, and the model has to have an `example_input_array`.
    kind: A key of WRITERS.
    """
    samples: Any = model.example_input_array
    normalize: Any = nn.Identity()
    classes: list[str] = []
    if isinstance(data, BaseDataModule):
        samples, normalize, classes = data.input_spec, data.normalize, data.classes
    if not isinstance(samples, Tensor):
        raise UserError(
            f"the inputs of {type(data).__name__} are not tensors of a known shape",
            "--format pth needs none; with a LightningDataModule of your own, set "
            f"self.example_input_array of {type(model).__name__} to a tensor (N, ...)",
        )
    predictor = Predictor(model, data, normalize).eval()
    batches = [random_batch(samples, size) for size in BATCH_SIZES]
    expected = [predictor(batch) for batch in batches]
    if not isinstance(expected[0], Tensor):
        raise UserError(
            f"predict_step of {type(model).__name__} has to return a tensor"
        )
    # what torch logs and warns of during an export is long, and of no use
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        program = trace(predictor, batches[0])
        content, run_file = WRITERS[kind](program, json.dumps(classes))
        largest = torch.tensor(0.0)  # torch's maximum, unlike Python's, keeps a NaN
        for batch, right in zip(batches, expected, strict=True):
            off = (run_file(batch) - right).abs().max()
            largest = largest.maximum(off / right.abs().max().clamp(min=1))
    if not largest <= TOLERANCE:  # also true for NaN
        raise UserError(
            "the export is wrong and was not kept: its outputs for random inputs are "
            f"{largest:.1e} off the checkpoint's"
        )
    return content, largest.item()


class Predictor(nn.Module):
    """The module whose graph is exported: from samples (N, ...), as the data module
    loads them, to the outputs of predict_step."""

    def __init__(self, model: LightningModule, data: Any, normalize: Any) -> None:
        super().__init__()
        self.model = model
        self.data = data
        self.normalize = normalize

    def forward(self, samples: Tensor) -> Any:
        inputs = for_network(self.normalize(samples), self.model)
        return in_units(self.data, prediction_step(self.model)((inputs, None), 0))


def random_batch(samples: Tensor, size: int) -> Tensor:
    """Return a batch of samples of this shape and dtype. Bytes have all values, other
    numbers are from 0 to 2. So integers are 0 or 1, which are indices of any embedding.
    """
    high = 2
    if samples.dtype == torch.uint8:
        high = 256
    return torch.zeros(size, *samples.shape[1:]).uniform_(0, high).to(samples.dtype)


def trace(predictor: Predictor, inputs: Tensor) -> ExportedProgram:
    """Return the graph for batches of any size. The network may not branch on numbers
    in its inputs or on the batch size.

    inputs: A batch of several samples: torch takes a size of 1 as fixed.
    """
    try:
        # a compiled part is traced as it is written
        with torch.compiler.set_stance("force_eager"):
            program = torch.export.export(
                predictor, (inputs,), dynamic_shapes=({0: Dim("batch")},), strict=False
            )
    except Exception as error:  # many types; the predictor has taken these inputs
        raise UserError(
            "the network cannot be exported as one graph for batches of any size",
            f"torch.export: {first_line(error)}",
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names folders of this machine
    return program


def as_pt2(program: ExportedProgram, classes: str) -> Written:
    """Return a file for torch.export.load, with the names of the classes, a JSON list,
    in its extra file classes.json."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"classes.json": classes})
    buffer.seek(0)
    return buffer.getvalue(), torch.export.load(buffer).module()


def as_onnx(program: ExportedProgram, classes: str) -> Written:
    """Return a file for ONNX Runtime, with the names of the classes in its metadata.
    The input is named `inputs`, the output `outputs`."""
    import onnxscript  # noqa: F401  # torch.onnx needs it
    from onnxruntime import InferenceSession

    onnx: Any = torch.onnx.export(
        program,
        dynamo=True,
        external_data=False,
        verbose=False,
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=({0: "batch"},),
    )
    onnx.model.metadata_props["classes"] = classes
    content = onnx.model_proto.SerializeToString()
    session = InferenceSession(content, providers=["CPUExecutionProvider"])

    def run_file(batch: Tensor) -> Tensor:
        (outputs,) = session.run(None, {"inputs": batch.numpy()})
        return torch.from_numpy(outputs)

    return content, run_file


WRITERS = {"onnx": as_onnx, "pt2": as_pt2}
"""By the format of the file: functions that write a graph."""
