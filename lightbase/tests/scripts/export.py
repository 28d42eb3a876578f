"""Write a trained network for other programs: python scripts/export.py --ckpt_path
FILE"""

from lightbase.commands.script import run_command

if __name__ == "__main__":
    run_command("commands.export")
