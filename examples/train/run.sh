#!/usr/bin/env bash
# Started by tpucare on every worker of the slice; TPUCARE_* variables say which one this is.
set -euo pipefail
cd "$(dirname "$0")"
exec python3 train.py "$@"
