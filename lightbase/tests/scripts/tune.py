"""Find a batch size and a learning rate.

python scripts/tune.py --config configs/mnist_mlp.yaml
"""

from lightbase.commands.script import run_command

if __name__ == "__main__":
    run_command("commands.tune")
