"""Predict for image files: python scripts/predict.py --ckpt_path FILE IMAGE ..."""

from lightbase.commands.script import run_command

if __name__ == "__main__":
    run_command("commands.predict")
