"""Search the flags of train.py: python scripts/sweep.py --search model.lr=0.001,0.01"""

from start import run

if __name__ == "__main__":
    run("compare.sweep")
