"""Show runs side by side: python scripts/runs.py"""

from lightbase.commands.script import run_command

if __name__ == "__main__":
    run_command("compare.runs")
