#!/usr/bin/env bash
# Makes ./venv with the Ray and the Python of the head, and what the examples import. Does nothing where it is there.
set -euo pipefail
cd "$(dirname "$0")"

# tpucare sets both from the head; by hand, name them.
ray=${TPUCARE_RAY_VERSION:?the version of Ray on the head, for instance 2.60.0}
python=${TPUCARE_RAY_PYTHON:?the Python of the head, for instance 3.11}

check="import jax, optax, hydra, ray, ray.train, sys
sys.exit((ray.__version__, '%d.%d' % sys.version_info[:2]) != ('$ray', '$python'))"
if [ -x venv/bin/python ] && venv/bin/python -c "$check" 2>/dev/null; then
  exit
fi
jax='jax[tpu]>=0.6'
if [ "${JAX_PLATFORMS:-}" = cpu ]; then
  jax='jax>=0.6'
fi
# uv brings every Python, and the image of a TPU VM has but one.
python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --clear --python "$python" venv
python3 -m uv pip install --quiet --python venv/bin/python \
  "ray[default,train,tune]==$ray" "$jax" 'optax>=0.2.4' hydra-core hydra-ray-launcher
