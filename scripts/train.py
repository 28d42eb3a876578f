"""Train a network, then test its best checkpoint.

python scripts/train.py
python scripts/train.py --config configs/mnist_mlp.yaml --model.lr 0.002 --name try2
"""

from start import run

if __name__ == "__main__":
    run("commands.train")
