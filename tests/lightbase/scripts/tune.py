"""Find a batch size and a learning rate: python scripts/tune.py --config configs/default.yaml"""

from lightbase.cli.script import starting

with starting(__file__, default_model="example.classifier.Classifier"):
    from lightbase.tools.tune import main

if __name__ == "__main__":
    main()
