"""Test a checkpoint again: python scripts/evaluate.py --ckpt_path FILE"""

from lightbase.commands.script import run_command

if __name__ == "__main__":
    run_command("commands.evaluate")
