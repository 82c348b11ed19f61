#!/bin/bash
# The job itself, on every worker at once. Its exit status is the run's.
cd "$HOME/.tpucare/work" || exit 72
export PATH="$HOME/.local/bin:$PATH"
exec bash -ec 'python3 train.py'
