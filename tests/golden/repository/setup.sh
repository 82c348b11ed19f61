#!/bin/bash
# The job's own setup: once per node and version of the code. The first failing line fails it.
cd "$HOME/.tpucare/work" || exit 72
export PATH="$HOME/.local/bin:$PATH"
exec bash -ec 'bash setup.sh'
