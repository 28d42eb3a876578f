"""Show runs side by side: python scripts/runs.py"""

from lightbase.commands.script import starting

with starting(__file__, default_model="example.classifier.Classifier"):
    from lightbase.compare.runs import main

if __name__ == "__main__":
    main()
