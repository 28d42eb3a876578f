"""Show runs side by side: python scripts/runs.py"""

from start import run

if __name__ == "__main__":
    run("compare.runs")
