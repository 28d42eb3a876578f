"""Predict for image files: python scripts/predict.py --ckpt_path FILE IMAGE ..."""

from start import run

if __name__ == "__main__":
    run("commands.predict")
