"""Find a batch size and a learning rate.

python scripts/tune.py --config configs/mnist_mlp.yaml
"""

from start import starting

with starting(__file__, default_model="project.classifier.Classifier"):
    from lightbase.commands.tune import main

if __name__ == "__main__":
    main()
