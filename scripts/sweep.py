"""Search the flags of train.py: python scripts/sweep.py --search model.lr=0.001,0.01"""

from start import starting

with starting(__file__, default_model="project.classifier.Classifier"):
    from lightbase.compare.sweep import main

if __name__ == "__main__":
    main()
