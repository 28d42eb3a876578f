"""A trained network as a file for other programs: its weights, or the graph of all that
predict.py computes.

A graph file takes batches of any size, as the data module loads them. Before it is
written, it runs on random batches and has to give the checkpoint's outputs. See
docs/export.md.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightbase.core.batches import for_network
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, first_line

TOLERANCE = 1e-4  # see largest_difference
BATCH_SIZES = (3, 1, 8)  # of the batches for the check; the first is traced
Graph = tuple[bytes, Callable[[Tensor], Tensor]]
"""The content of a file, and a function that runs the file on a batch."""


def weights_file(net: nn.Module) -> bytes:
    """Return the content of a pth file: the state_dict of the network, on the CPU.

    Other programs load it with torch.load(file, weights_only=True).
    """
    buffer = io.BytesIO()
    weights = {name: value.cpu() for name, value in net.state_dict().items()}
    torch.save(weights, buffer)
    return buffer.getvalue()


@torch.no_grad()
def graph_file(
    model: LightningModule, data: LightningDataModule, kind: str
) -> tuple[bytes, float]:
    """Return the content of a file with the graph and its weights, and the largest
    difference of its outputs from the checkpoint's.

    model, data: The model and the data of the checkpoint. The file takes what a
        BaseDataModule loads. For other data it takes the inputs of the network, and the
        model has to have an `example_input_array`.
    kind: "onnx" or "pt2".
    Raise UserError if there is no such graph, or if the file gives other outputs.
    """
    samples: Any = model.example_input_array
    normalize: Callable[[Tensor], Tensor] = nn.Identity()
    classes: list[str] = []
    way_out = (
        f"set self.example_input_array of {type(model).__name__} to a tensor (N, ...)"
    )
    if isinstance(data, BaseDataModule):
        samples = data.input_spec
        normalize = data.normalize
        classes = data.classes
        way_out = "--format pth needs none"
    if not isinstance(samples, Tensor):
        name = type(data).__name__
        raise UserError(
            f"the inputs of {name} are no tensors of a known shape", way_out
        )
    predictor = Predictor(model, normalize)
    batches = random_batches(samples)
    expected = [predictor(batch) for batch in batches]
    for size, outputs in zip(BATCH_SIZES, expected, strict=True):
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != (size,):
            raise UserError(
                f"predict_step of {type(model).__name__} has to return a tensor with a "
                "row for each input"
            )
    # what torch logs and warns of during an export is long, and of no use
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        program = trace(predictor, batches[0])
        write = as_pt2
        if kind == "onnx":
            write = as_onnx
        content, run_file = write(program, json.dumps(classes))
        outputs = [run_file(batch) for batch in batches]
    return content, largest_difference(outputs, expected)


def largest_difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, as a part of 1, or of the largest expected output
    if that is more.

    So the limit is absolute for probabilities and relative for large outputs.

    outputs, expected: The outputs of the file and of the checkpoint for each batch.
    Raise UserError if the difference is over TOLERANCE or NaN.
    """
    largest = 0.0
    for output, right in zip(outputs, expected, strict=True):
        scale = max(1.0, right.abs().max().item())
        difference = (output.double() - right.double()).abs().max().item() / scale
        if not difference <= TOLERANCE:  # also true for NaN
            raise UserError(
                "the export is wrong and was not kept: its outputs for "
                f"{len(right)} random inputs are {difference:.1e} off the checkpoint's"
            )
        largest = max(largest, difference)
    return largest


class Predictor(nn.Module):
    """From samples (N, ...), as the data module loads them, to the outputs of
    predict_step. The graph in a file is the graph of this module.

    model: It is in eval mode afterwards.
    normalize: The function of the data module.
    """

    def __init__(
        self, model: LightningModule, normalize: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.normalize = normalize
        # Lightning's own predict_step hands its argument to forward
        self.takes_batches = is_overridden("predict_step", model)

    def forward(self, samples: Tensor) -> Any:
        """Return the outputs of predict_step. samples: (N, ...)."""
        batch: Any = for_network(self.normalize(samples), self.model)
        if self.takes_batches:
            batch = (batch, None)
        return self.model.predict_step(batch, 0)


def random_batches(samples: Tensor) -> list[Tensor]:
    """Return batches of BATCH_SIZES. Bytes have all values, other integers are 0 and 1,
    which are indices of any embedding. Floats are standard normal.

    samples: A tensor (any number, ...) with the shape and dtype of the samples.
    """
    generator = torch.Generator().manual_seed(0)
    batches = []
    for size in BATCH_SIZES:
        shape = (size, *samples.shape[1:])
        if samples.is_floating_point():
            batch = torch.randn(shape, generator=generator)
        else:
            high = 2
            if samples.dtype == torch.uint8:
                high = 256
            batch = torch.randint(high, shape, generator=generator)
        batches.append(batch.to(samples.dtype))
    return batches


def trace(predictor: Predictor, inputs: Tensor) -> ExportedProgram:
    """Return the graph for batches of any size. Raise UserError if the network branches
    on numbers in its inputs or on the batch size.

    inputs: A batch. It has more than one sample: torch takes a size of 1 as fixed.
    """
    shapes = ({0: Dim("batch")},)
    try:
        # a compiled part is traced as it is written
        with torch.compiler.set_stance("force_eager"):
            program = torch.export.export(
                predictor, (inputs,), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:  # many types; the predictor has taken these inputs
        raise UserError(
            "the network cannot be exported as one graph for batches of any size",
            f"torch.export: {first_line(error)}",
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names folders of this machine
    return program


def as_pt2(program: ExportedProgram, classes: str) -> Graph:
    """Return a file for torch.export.load, which holds the names of the classes in its
    extra file classes.json.

    classes: A JSON list of names.
    """
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"classes.json": classes})
    buffer.seek(0)
    return buffer.getvalue(), torch.export.load(buffer).module()


def as_onnx(program: ExportedProgram, classes: str) -> Graph:
    """Return a file for ONNX Runtime, which holds the names of the classes in its
    metadata.

    The input is named `inputs`, the output `outputs`. The file is run on the CPU.

    classes: A JSON list of names.
    Raise UserError if the packages for ONNX are missing, or if the network cannot be
    written.
    """
    try:
        import onnxscript  # noqa: F401  # torch.onnx needs it
        from onnxruntime import InferenceSession
    except ImportError as error:
        problem = f'--format onnx: {error}: pip install -e ".[export]"'
        raise UserError(problem, status=2) from error
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
        onnx.model.metadata_props["classes"] = classes
        content = onnx.model_proto.SerializeToString()
        session = InferenceSession(content, providers=["CPUExecutionProvider"])
    # torch's, or ONNX Runtime's, which has no convolution of float64
    except Exception as error:
        cause = error
        if isinstance(error.__cause__, Exception):
            cause = error.__cause__  # the message of the outer error is advice
        problem = "the network cannot be written as ONNX; --format pt2 may do"
        raise UserError(problem, first_line(cause)) from error

    def run_file(batch: Tensor) -> Tensor:
        """Return the outputs of the file for a batch."""
        (outputs,) = session.run(None, {"inputs": batch.numpy()})
        return torch.from_numpy(outputs)

    return content, run_file
