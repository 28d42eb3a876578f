"""CIFAR-10: photographs of ten kinds of things, 50,000 for training, 10,000 for the
test, 32x32."""

from typing import Literal

import torch
from jsonargparse.typing import NonNegativeInt
from torch import Tensor
from torchvision import datasets

from lightbase import (
    BaseDataModule,
    Batch,
    alternating_flip,
    crop_and_flip,
    open_or_download,
    to_float,
)


class CIFAR10(BaseDataModule):
    """Images (N, 3, 32, 32) in [0, 1], not normalised further.

    Files: data_dir/cifar-10-batches-py, downloaded by torchvision if they are missing
    or damaged. It knows the MD5 of the published files.

    Args:
        random_crop: Shift training images by up to this many pixels; 0 leaves them. 4
            is usual.
        crop_mode: Fill the edges with zeros, "constant", or with the mirror image,
            "reflect".
        random_flip: Mirror half of the training images, drawn anew for each batch.
            "alternating" mirrors one half in even epochs and the other half in odd
            epochs.
    """

    classes = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    image_shape = (3, 32, 32)

    def __init__(
        self,
        random_crop: NonNegativeInt = 0,
        crop_mode: Literal["constant", "reflect"] = "constant",
        random_flip: bool | Literal["alternating"] = False,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.random_crop = random_crop
        self.crop_mode: Literal["constant", "reflect"] = crop_mode
        self.random_flip = random_flip

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Return images uint8 (N, 3, 32, 32) and classes int64 (N,)."""
        data = open_or_download(
            datasets.CIFAR10,
            self.data_dir,
            f"cifar-10-python.tar.gz into {self.data_dir}",
            root=self.data_dir,
            train=split == "train",
        )
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
        return images, torch.tensor(data.targets)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        """Mirror and shift uint8 images (N, 3, 32, 32), as the arguments say."""
        if self.random_flip == "alternating":
            inputs = alternating_flip(inputs, self.trainer.current_epoch)
        flip = self.random_flip is True
        return crop_and_flip(inputs, self.random_crop, flip, self.crop_mode)
