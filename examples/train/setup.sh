#!/usr/bin/env bash
# Run once on every new worker, before run.sh. Does nothing when everything is there, so that a warm image starts fast.
set -euo pipefail
cd "$(dirname "$0")"

if python3 -c 'import jax, optax, orbax.checkpoint' 2>/dev/null; then
  exit 0
fi

if [[ "${JAX_PLATFORMS:-}" == cpu || -n "${TPUCARE_DEMO_CPU:-}" ]]; then
  jax='jax>=0.6'
else
  jax='jax[tpu]>=0.6'
fi
# gcsfs reads and writes checkpoints in gs:// buckets.
exec python3 -m pip install --quiet "$jax" 'optax>=0.2.4' 'orbax-checkpoint>=0.11' gcsfs
