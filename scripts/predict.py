"""Classify image files, or all images in folders, with a checkpoint.

python scripts/predict.py --ckpt_path logs/cifar10_cnn/version_0/checkpoints/best.ckpt cat.jpg photos/
python scripts/predict.py --ckpt_path ... photos/ --output predictions.csv

Images of any size and mode are brought to the size and channels that the network was trained with. Files that cannot
be read are reported and left out; the exit status is then 1.
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
from project.base.errors import ScriptParser, UserError, output_file, short_errors, write_whole
from project.base.image_files import find_images, read_image
from project.engine.cli import load_run
from project.engine.quiet import quiet_lightning

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
        shape = getattr(run.datamodule, "image_shape", None)
        if shape is None or not isinstance(run.datamodule, TensorDataModule):
            raise UserError(f"{known.ckpt_path} was trained on {type(run.datamodule).__name__}, which are no images")
        if shape[0] not in (1, 3) or not isinstance(getattr(run.model, "net", None), torch.nn.Module):
            raise UserError(f"{known.ckpt_path} has no network `net` for images of 1 or 3 channels")
        files, unreadable = find_images(known.images)
        rows = []
        for batch_files, images in read_batches(files, shape, unreadable):
            for file, (index, probability) in zip(
                batch_files, classify(run.model, run.datamodule, images), strict=True
            ):
                rows.append((str(file), run.datamodule.classes[index], f"{probability:.4f}"))
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
def classify(model: LightningModule, data: TensorDataModule, images: Tensor) -> list[tuple[int, float]]:
    """Index and probability of the likeliest class of each image, uint8 (N, C, H, W)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = model.eval().to(device)
    probabilities = net(data.normalize(images.to(device))).softmax(1)
    top = probabilities.max(1)
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def write(rows: list[tuple[str, str, str]], output: Path | None) -> None:
    header = ("file", "class", "probability")
    if output is not None:
        text = io.StringIO()
        csv.writer(text).writerows([header, *rows])
        write_whole(output, text.getvalue())
        print(f"{len(rows)} predictions in {output}")
    elif rows:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
        for row in [header, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
