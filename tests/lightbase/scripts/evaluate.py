"""Test a checkpoint again: python scripts/evaluate.py --ckpt_path FILE"""

from lightbase.cli.script import starting

with starting(__file__, default_model="example.classifier.Classifier"):
    from lightbase.tools.evaluate import main

if __name__ == "__main__":
    main()
