"""Write a trained network for other programs: python scripts/export.py --ckpt_path
FILE"""

from start import starting

with starting(__file__, default_model="project.classifier.Classifier"):
    from lightbase.commands.export import main

if __name__ == "__main__":
    main()
