"""CIFAR-10: small photographs of ten kinds of things, 50,000 training and 10,000 test images,
32x32, colour."""

from typing import Literal

import torch
from jsonargparse.typing import NonNegativeInt
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from lightbase import BaseDataModule, Batch, UserError, open_or_download
from lightbase.data.transforms import alternating_flip, crop_and_flip, to_float


class CIFAR10(BaseDataModule):
    """Images (N, 3, 32, 32) in [0, 1], not normalised further.

    Files: data_dir/cifar-10-batches-py, downloaded by torchvision where they are missing.

    Args:
        random_crop: Shift training images by up to this many pixels; 0 leaves them. 4 is usual.
        crop_mode: What moves in at the edges: "constant", zeros, or "reflect", the image mirrored.
        random_flip: Mirror half of the training images, drawn anew for each batch; "alternating":
            one half in even epochs, the other in odd ones.
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
        if crop_mode == "reflect" and random_crop >= self.image_shape[1]:
            raise ValueError(
                f"data.random_crop {random_crop}: with crop_mode reflect at most "
                f"{self.image_shape[1] - 1}"
            )
        self.random_crop = random_crop
        self.crop_mode: Literal["constant", "reflect"] = crop_mode
        self.random_flip = random_flip

    def prepare_data(self) -> None:
        source = datasets.CIFAR10
        for name, md5 in (*source.train_list, *source.test_list):
            file = self.data_dir / source.base_folder / name
            if file.is_file() and not check_integrity(file, md5):
                raise UserError(
                    f"{file} is damaged (cut short or altered): delete it to download it again"
                )
        open_or_download(
            source, self.data_dir, f"{source.filename} into {self.data_dir}", root=self.data_dir
        )

    def load(self, split: Literal["train", "test"]) -> Batch:
        data = datasets.CIFAR10(self.data_dir, train=split == "train")
        return torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(
            data.targets
        )

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        if self.random_flip == "alternating":
            inputs = alternating_flip(inputs, self.trainer.current_epoch)
        return crop_and_flip(inputs, self.random_crop, self.random_flip is True, self.crop_mode)
