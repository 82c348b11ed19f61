#!/usr/bin/env bash
# Runs once on every new worker, before run.sh. Does nothing if all packages are installed, so a warm image starts fast.
set -euo pipefail
cd "$(dirname "$0")"

modules='jax, optax, orbax.checkpoint'
packages=('optax>=0.2.4' 'orbax-checkpoint>=0.11')
if [[ "${JAX_PLATFORMS:-}" == cpu || "${TPUCARE_DEMO_CPU:-0}" != 0 ]]; then
  packages+=('jax>=0.6')
else
  packages+=('jax[tpu]>=0.6')
fi
if [[ "${TPUCARE_CHECKPOINT:-}" == gs://* ]]; then
  modules+=', gcsfs' # reads and writes checkpoints in buckets
  packages+=(gcsfs)
fi

python3 -c "import $modules" 2>/dev/null || exec python3 -m pip install --quiet "${packages[@]}"
