"""Checks of gpu_checks.py that are more than a command: an assertion fails where a GPU
differs.

python gpu_compare.py augment cuda    # random transforms, against a CPU's
python gpu_compare.py graphs FOLDER mnist_mlp --trainer.accelerator gpu   # replays, against ordinary steps
python gpu_compare.py killed FOLDER --trainer.accelerator gpu   # kill -9, same weights
python gpu_compare.py memory --trainer.accelerator gpu   # a full memory: two lines
"""

import subprocess
import sys
import time
from pathlib import Path

import torch
from example.models.cnn import CIFAR10CNN
from test_cuda_graphs import assert_same
from torch import Tensor, nn
from torch.nn import functional

from lightbase import alternating_flip, random_crop, random_flip

REPO = Path(__file__).parents[2]
IMAGES = "--data project.data.synthetic.SyntheticImages --data.num_train 8000 "
GENERATED = {
    "mnist_mlp": f"{IMAGES} --data.image_shape [1,28,28]",
    "cifar10_cnn": f"{IMAGES} --data.image_shape [3,32,32]",
}
"""In place of data that would be downloaded."""
TRAIN = [sys.executable, "scripts/train.py", "--config"]


class Noisy(CIFAR10CNN):
    """With dropout, whose random numbers must go on where they were."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.1, self.training))


class Full(nn.Module):
    """Needs more memory than there is."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(2**50, device=x.device)


def augment(device: str) -> None:
    """Each image is one of the candidates, and each candidate occurs."""
    image = torch.randint(256, (3, 8, 8), dtype=torch.uint8)
    images = image.expand(500, 3, 8, 8).to(device)
    for mode in ("constant", "reflect"):
        padded = functional.pad(image[None].float(), [2] * 4, mode)[0].byte()
        crops = padded.unfold(1, 8, 1).unfold(2, 8, 1)  # (3, 5, 5, 8, 8)
        candidates = crops.permute(1, 2, 0, 3, 4).reshape(25, 3, 8, 8)
        check_same_images(random_crop(images, 2, mode), candidates)
    check_same_images(random_flip(images), torch.stack([image, image.flip(-1)]))
    for epoch in range(2):
        expected = alternating_flip(images.cpu(), epoch)
        assert torch.equal(alternating_flip(images, epoch).cpu(), expected)


def check_same_images(images: Tensor, candidates: Tensor) -> None:
    assert torch.equal(images.cpu().unique(dim=0), candidates.unique(dim=0))


def killed(folder: str, *flags: str) -> None:
    words = "configs/default.yaml --trainer.deterministic true --trainer.max_epochs 3 "
    words += "--data.num_train 1500 --data.num_test 100 --model.net gpu_compare.Noisy "
    words += f"--trainer.default_root_dir {folder} {' '.join(flags)} --name"
    command = [*TRAIN, *words.split()]
    subprocess.run([*command, "expected"], check=True)
    process = subprocess.Popen([*command, "killed"])
    last = Path(folder, "killed", "version_0", "checkpoints", "last.ckpt")
    while not last.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9
    subprocess.run([*command, "killed", "--ckpt_path", "last"], check=True)
    paths = (last, str(last).replace("killed", "expected"))
    found, expected = (torch.load(path, weights_only=True) for path in paths)
    for name, value in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value), name


def graphs(folder: str, name: str, *flags: str) -> None:
    """An experiment of configs/ ends with the weights, the state and the curves of
    ordinary steps if its steps are replayed."""
    words = f"--config {REPO}/configs/{name}.yaml --trainer.deterministic true "
    words += "--trainer.max_epochs 2 --trainer.log_every_n_steps 7 "
    words += f"--trainer.default_root_dir {folder} {GENERATED.get(name, '')}"
    command = [sys.executable, f"{REPO}/scripts/train.py", *words.split(), *flags]
    for value in ("false", "true"):
        more = ["--cuda_graphs", value, "--name", value]
        done = subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        assert done.returncode == 0
        assert "Ordinary steps" not in done.stdout
    assert_same(Path(folder, "true/version_0"), Path(folder, "false/version_0"))


def memory(*flags: str) -> None:
    command = [*TRAIN, "tiny.yaml", "--model.net", "gpu_compare.Full", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr)
    first, *_, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert "memory" in first
    assert "--data.batch_size" in last


if __name__ == "__main__":
    functions = {"augment": augment, "graphs": graphs, "killed": killed}
    (functions | {"memory": memory})[sys.argv[1]](*sys.argv[2:])
