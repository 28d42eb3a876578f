#!/usr/bin/env bash
# What only a GPU can prove: one command, twenty minutes, no network. See lightbase/tests/gpu_checks.py, and docs/devices.md.
#   bash tests/gpu_check.sh            on a machine with a GPU
#   bash tests/gpu_check.sh --dry      the same commands on a CPU
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" lightbase/tests/gpu_checks.py "$@"
