"""Write a trained network for other programs: python scripts/export.py --ckpt_path
FILE"""

from start import run

if __name__ == "__main__":
    run("commands.export")
