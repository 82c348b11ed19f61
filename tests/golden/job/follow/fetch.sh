#!/bin/bash
# Fetches the job's code to this worker. Code of the same commit or bundle is left unchanged.
set -euo pipefail
run="$HOME/.tpucare/"pod-0-a3.1
base="$HOME/.tpucare"
work="$base/work"
source="$base/work.source"
mkdir -p "$work"
# Private repositories: a deploy key in the secret GIT_SSH_KEY, or a token in GIT_TOKEN or GITHUB_TOKEN.
export GIT_TERMINAL_PROMPT=0
ssh='ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new'
if [ -n "${GIT_SSH_KEY-}" ]; then
  (umask 077 && printf '%s\n' "$GIT_SSH_KEY" >"$run/git-key")
  ssh="$ssh -o IdentitiesOnly=yes -i $(printf %q "$run/git-key")"
fi
export GIT_SSH_COMMAND="$ssh"
if [ -n "${GIT_TOKEN-${GITHUB_TOKEN-}}" ]; then
  export GIT_ASKPASS="$run/askpass.sh"
fi
repository='git@example.org:it'"'"'s/here.git'
branch='a b'
wanted="${TPUCARE_COMMIT-}"
git() { command git -c advice.detachedHead=false -c protocol.version=2 -C "$work" "$@"; }

fetch() {
  git fetch -q --depth 1 -- origin "${wanted:-${branch:-HEAD}}" ||
    { [ -n "$wanted" ] && git fetch -q -- origin "${branch:-HEAD}"; }
}

if [ -z "$wanted" ] || [ "$(cat "$source" 2>/dev/null)" != "$repository $wanted" ]; then
  rm -f "$source"
  command git init -q "$work"
  # Locks of a killed fetch: while this run holds the worker's lock, no other fetch of ours is under way.
  find "$work/.git" -name '*.lock' -delete
  git remote add -- origin "$repository" 2>/dev/null || git remote set-url -- origin "$repository"
  for pause in 1 3 0; do
    if fetch; then break; fi
    [ "$pause" -gt 0 ] || exit 1
    sleep "$pause"
  done
  git checkout -q -f --detach "${wanted:-FETCH_HEAD}"
  [ ! -f "$work/.gitmodules" ] || git submodule update -q --init --recursive --depth 1
  commit=$(git rev-parse HEAD)
  printf 'at commit %s\n' "$commit"
  printf '%s %s' "$repository" "$commit" >"$source"
fi
