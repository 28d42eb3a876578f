"""Search the flags of train.py: python scripts/sweep.py --search model.lr=0.001,0.01"""

from lightbase.commands.script import run_command

if __name__ == "__main__":
    run_command("compare.sweep")
