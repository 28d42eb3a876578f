"""Test a checkpoint again: python scripts/evaluate.py --ckpt_path FILE"""

from start import starting

with starting(__file__, default_model="project.classifier.Classifier"):
    from lightbase.commands.evaluate import main

if __name__ == "__main__":
    main()
