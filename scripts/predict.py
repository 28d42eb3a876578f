"""Predict for image files, or all images in folders, with a checkpoint: what the system's predict_step returns.

python scripts/predict.py --ckpt_path logs/cifar10_cnn/version_0/checkpoints/best.ckpt cat.jpg photos/
python scripts/predict.py --ckpt_path ... photos/ --output predictions.csv

A row for each file: the likeliest class and its probability, where the data has classes; the numbers otherwise. Images
of any size and mode are brought to the size and channels that the network was trained with. Files that cannot be read
are reported and left out; the exit status is then 1.
"""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning import LightningModule
from torch import Tensor

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.image_files import find_images, read_image
from project.engine.quiet import quiet_lightning
from project.engine.resume import load_run
from project.engine.script import ScriptParser, output_file, short_errors, write_whole

BATCH_SIZE = 256


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="a run's checkpoint, best.ckpt for instance")
    parser.add_argument("--output", type=output_file, help="write a CSV file instead of a table")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="image files or folders of them")
    with short_errors():
        known = parser.parse_args(args)
        quiet_lightning()
        run = load_run(known.ckpt_path)
        data = run.datamodule
        if not isinstance(data, TensorDataModule) or data.image_shape is None:
            raise UserError(f"{known.ckpt_path} was trained on {type(data).__name__}, which are no images")
        if data.image_shape[0] not in (1, 3):
            raise UserError(f"{known.ckpt_path} was trained on images of {data.image_shape[0]} channels: give 1 or 3")
        files, unreadable = find_images(known.images)
        rows: list[tuple[str, ...]] = []
        for batch_files, images in read_batches(files, data.image_shape, unreadable):
            outputs = predict(run.model, data, images)
            header, columns = describe(outputs, data.classes)
            rows = rows or [("file", *header)]
            rows += [(str(file), *cells) for file, cells in zip(batch_files, columns, strict=True)]
        write(rows, known.output)
        for file, reason in unreadable:
            print(f"cannot read {file}: {reason}", file=sys.stderr)
        if unreadable:
            sys.exit(1)


def read_batches(
    files: list[Path], shape: tuple[int, int, int], unreadable: list[tuple[Path, str]]
) -> Iterator[tuple[list[Path], Tensor]]:
    """Batches of readable files with their images, uint8 (N, C, H, W); the others go to `unreadable`."""
    readable: list[Path] = []
    images: list[Tensor] = []
    for file in files:
        try:
            images.append(read_image(file, shape))
            readable.append(file)
        except UserError as error:
            unreadable.append((file, str(error)))
        if len(images) == BATCH_SIZE:
            yield readable, torch.stack(images)
            readable, images = [], []
    if images:
        yield readable, torch.stack(images)


@torch.inference_mode()
def predict(model: LightningModule, data: TensorDataModule, images: Tensor) -> Tensor:
    """What predict_step returns for images, uint8 (N, C, H, W): (N, ...)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = data.normalize(images.to(device))
    outputs = model.eval().to(device).predict_step((inputs, None), 0)
    if not isinstance(outputs, Tensor) or len(outputs) != len(images):
        raise UserError(f"predict_step of {type(model).__name__} has to return a tensor with a row for each image")
    return outputs.cpu()


def describe(outputs: Tensor, classes: list[str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns' names, and a row for each image."""
    outputs = outputs.reshape(len(outputs), -1)
    rows: list[tuple[str, ...]]
    if classes and outputs.shape[1] >= len(classes):
        top = outputs.max(1)
        names = [*classes, *map(str, range(len(classes), outputs.shape[1]))]
        rows = [(names[i], f"{value:.4f}") for i, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        return ("class", "probability"), rows
    names = ["prediction"] if outputs.shape[1] == 1 else [f"prediction_{i}" for i in range(outputs.shape[1])]
    return tuple(names), [tuple(f"{value:.6g}" for value in row) for row in outputs.tolist()]


def write(rows: list[tuple[str, ...]], output: Path | None) -> None:
    """rows: the columns' names first; empty where no image could be read."""
    if output is not None:
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        write_whole(output, text.getvalue())
        print(f"{max(0, len(rows) - 1)} predictions in {output}")
    elif rows:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
