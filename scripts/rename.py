"""Give the package another name: python scripts/rename.py my_project"""

from lightbase.cli.script import starting

with starting(__file__, default_model="project.classifier.Classifier"):
    from lightbase.tools.rename import main

if __name__ == "__main__":
    main()
