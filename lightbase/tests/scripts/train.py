"""Train a network, then test its best checkpoint.

python scripts/train.py
python scripts/train.py --config configs/mnist_mlp.yaml --model.lr 0.002 --name try2
"""

from lightbase.commands.script import run_command

if __name__ == "__main__":
    run_command("commands.train")
