"""Search the flags of train.py: python scripts/sweep.py --search model.lr=0.001,0.01"""

from lightbase.commands.script import starting

with starting(__file__, default_model="example.classifier.Classifier"):
    from lightbase.compare.sweep import main

if __name__ == "__main__":
    main()
