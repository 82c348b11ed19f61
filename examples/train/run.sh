#!/usr/bin/env bash
# tpucare starts this on every worker of the slice; TPUCARE_* variables identify the worker.
set -euo pipefail
cd "$(dirname "$0")"
exec python3 train.py "$@"
