"""Download and check a data set: python scripts/prepare_data.py --config configs/mnist_mlp.yaml"""

from lightbase.cli.script import starting

with starting(__file__, default_model="project.classifier.Classifier"):
    from lightbase.tools.prepare_data import main

if __name__ == "__main__":
    main()
