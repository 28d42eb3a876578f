"""Train a network, then test its best checkpoint.

python scripts/train.py
python scripts/train.py --config configs/mnist_mlp.yaml --model.lr 0.002 --name try2
"""

from project.engine.script import starting

with starting():
    from project.engine.run import main

if __name__ == "__main__":
    main()
