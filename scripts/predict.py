"""Predict for image files: python scripts/predict.py --ckpt_path FILE IMAGE ..."""

from start import starting

with starting(__file__, default_model="project.classifier.Classifier"):
    from lightbase.commands.predict import main

if __name__ == "__main__":
    main()
