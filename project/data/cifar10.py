"""CIFAR-10: photographs of ten kinds of things, 50,000 for training, 10,000 for the
test, 32x32."""

from pathlib import Path
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeInt
from torch import Tensor
from torchvision import datasets

from lightbase import (
    BaseDataModule,
    Batch,
    UserError,
    open_or_download,
    read_arrays,
    say,
)
from lightbase.extras.transforms import alternating_flip, crop_and_flip, to_float

# size in bytes of the published files (A. Krizhevsky: Learning multiple layers of
# features, 2009)
TRAIN = {
    "data_batch_1": 31_035_704,
    "data_batch_2": 31_035_320,
    "data_batch_3": 31_035_999,
}
TRAIN |= {"data_batch_4": 31_035_696, "data_batch_5": 31_035_623}
SIZES = {"train": TRAIN, "test": {"test_batch": 31_035_526}}


class CIFAR10(BaseDataModule):
    """Images (N, 3, 32, 32) in [0, 1], not normalised further.

    Files: data_dir/cifar-10-batches-py, downloaded by torchvision if they are missing
    or damaged. Files of other sizes than the published ones (packed anew, say) are used
    as they are.

    Args:
        random_crop: Shift training images by up to this many pixels; 0 leaves them. 4
            is usual.
        crop_mode: Fill the edges with zeros, "constant", or with the mirror image,
            "reflect".
        random_flip: Mirror half of the training images, drawn anew for each batch.
            "alternating" mirrors one half in even epochs and the other half in odd
            epochs.
    """

    classes = ["airplane", "automobile", "bird", "cat", "deer"]
    classes += ["dog", "frog", "horse", "ship", "truck"]
    image_shape = (3, 32, 32)

    def __init__(
        self,
        random_crop: NonNegativeInt = 0,
        crop_mode: Literal["constant", "reflect"] = "constant",
        random_flip: bool | Literal["alternating"] = False,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        if crop_mode == "reflect" and random_crop >= self.image_shape[1]:
            raise ValueError(
                f"random_crop {random_crop}: with crop_mode reflect at most 31"
            )
        self.random_crop = random_crop
        self.crop_mode: Literal["constant", "reflect"] = crop_mode
        self.random_flip = random_flip

    @property
    def folder(self) -> Path:
        return self.data_dir / "cifar-10-batches-py"

    def is_repacked(self) -> bool:
        """Whether all files are there, and some are of other sizes than published."""
        sizes = SIZES["train"] | SIZES["test"]
        files = {self.folder / name: size for name, size in sizes.items()}
        is_complete = all(file.is_file() for file in files)
        return is_complete and any(
            file.stat().st_size != size for file, size in files.items()
        )

    def load(self, split: Literal["train", "test"]) -> Batch:
        if self.is_repacked():
            what = (
                f"not the published files, packed anew or other data, in {self.folder}"
            )
            say(f"CIFAR10: {what} ({split})")
            batches = [
                read_arrays(self.folder / name, "data", "labels")
                for name in SIZES[split]
            ]
            pixels, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            if pixels.dtype != torch.uint8 or pixels.shape[1:] != (3072,):
                what = f"{tuple(pixels.shape)} {pixels.dtype}, not (N, 3072) uint8"
                raise UserError(f"the images in {self.folder} are {what}")
            return pixels.view(-1, 3, 32, 32), targets
        source, files = datasets.CIFAR10, f"cifar-10-python.tar.gz into {self.data_dir}"
        is_train = split == "train"
        data = open_or_download(
            source, self.data_dir, files, root=self.data_dir, train=is_train
        )
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
        return images, torch.tensor(data.targets)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        if self.random_flip == "alternating":
            inputs = alternating_flip(inputs, self.trainer.current_epoch)
        return crop_and_flip(
            inputs, self.random_crop, self.random_flip is True, self.crop_mode
        )
