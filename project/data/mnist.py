"""MNIST: handwritten digits, 60,000 training and 10,000 test images, 28x28, grey."""

from typing import Literal

from jsonargparse.typing import NonNegativeInt
from torch import Tensor
from torchvision import datasets

from lightbase import BaseDataModule, Batch, crop_and_flip, open_or_download, to_float

FILES = {
    "MNIST/raw/train-images-idx3-ubyte": (
        47_040_016,
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    "MNIST/raw/train-labels-idx1-ubyte": (60_008, "a25bea736e30d166cdddb491f175f624"),
    "MNIST/raw/t10k-images-idx3-ubyte": (7_840_016, "2646ac647ad5339dbf082846283269ea"),
    "MNIST/raw/t10k-labels-idx1-ubyte": (10_008, "27ae3e4e09519cfbb04c329615203637"),
}
"""Size in bytes and MD5 of the published files (LeCun, Cortes, Burges: The MNIST
database), unpacked."""


class MNIST(BaseDataModule):
    """Images (N, 1, 28, 28), normalised with mean 0.5 and std 0.5 to [-1, 1]; classes
    "0" to "9".

    Files: data_dir/MNIST/raw, downloaded by torchvision if they are missing. Files of
    other sizes than the published ones (a smaller set in the same format, say) are used
    as they are.

    Args:
        random_crop: Shift training images by up to this many pixels; 0 leaves them.
    """

    classes = [str(digit) for digit in range(10)]
    image_shape = (1, 28, 28)

    def __init__(self, random_crop: NonNegativeInt = 0, **kwargs) -> None:
        super().__init__(**kwargs)
        self.random_crop = random_crop

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Return images uint8 (N, 1, 28, 28) and digits int64 (N,)."""
        names = ", ".join(f"{name}.gz" for name in FILES)
        data = open_or_download(
            datasets.MNIST,
            self.data_dir,
            f"{names} into {self.data_dir}",
            published=FILES,
            root=self.data_dir,
            train=split == "train",
        )
        return data.data.unsqueeze(1), data.targets

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, mean=0.5, std=0.5)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, flip=False)
