"""Test a checkpoint again: python scripts/evaluate.py --ckpt_path FILE"""

from start import run

if __name__ == "__main__":
    run("commands.evaluate")
