#!/bin/bash
# Which commit the branch is at now: asked once, on one worker, so that every worker of the gang gets the same.
set -euo pipefail
run="$HOME/.tpucare/"pod-0-a3.1
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
# The same run asked again (an answer was lost) gets the same answer, for some of its workers may have begun with it.
if [ -s "$run/commit" ]; then
  cat "$run/commit"
  exit 0
fi
# In order of preference: a branch, what an annotated tag points at, a tag; without a branch the repository's default.
refs=(refs/heads/main 'refs/tags/main^{}' refs/tags/main)
listing=$(timeout 60 git ls-remote -- https://github.com/HomebrewNLP/HomebrewNLP-Jax "${refs[@]}")
for ref in "${refs[@]}"; do
  while read -r commit name; do
    if [ "$name" = "$ref" ]; then
      printf 'commit %s\n' "$commit" | tee "$run/commit.new"
      mv "$run/commit.new" "$run/commit"
      exit 0
    fi
  done <<<"$listing"
done
printf '%s has no branch or tag named %s\n' https://github.com/HomebrewNLP/HomebrewNLP-Jax main >&2
exit 1
