"""Find a batch size and a learning rate.

python scripts/tune.py --config configs/mnist_mlp.yaml
"""

from start import run

if __name__ == "__main__":
    run("commands.tune")
