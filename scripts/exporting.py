"""What export.py makes a graph of: a run's predict_step behind the normalisation; and batches to
check a file with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from project.base.datamodule import TensorDataModule
from project.base.download import prepare_data
from project.base.errors import UserError
from project.base.loaded import shape_of_images
from project.base.system import System

SIZES = (3, 1, 8)  # of the batches to check with; a graph is made with the first


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
        return type(model.net if isinstance(model, System) else model).__name__


@torch.no_grad()
def make_subject(model: LightningModule, data: LightningDataModule, raw: bool | None) -> Subject:
    """raw: whether inputs are as the data module loads them, or as the network takes them; None: as
    far as is known.

    Raises UserError where it is not known what they are, or where predict_step gives nothing to
    compare.
    """
    name, ours = type(model).__name__, data if isinstance(data, TensorDataModule) else None
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
    if not isinstance(data, TensorDataModule):
        if isinstance(model.example_input_array, Tensor):
            return model.example_input_array
        what = f"what the network takes of {name} is not known"
        raise UserError(
            f"{what}\nset self.example_input_array of {type(model).__name__} to such a "
            "tensor, (N, ...)"
        )
    if data.empty_batch is None:  # the checkpoint does not know it
        prepare_data(data)
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
