#!/usr/bin/env bash
# Check out the newest commit of BRANCH, or COMMIT if given: on_all.sh passes the same commit to all workers. A live run
# keeps its loaded code; resume.sh restarts it with the new code.
set -euo pipefail
source "$(dirname "$0")/settings.sh"

cd "$CODE" 2>/dev/null || die "there is no clone yet: run install.sh"
git fetch --quiet --depth 1 -- "$REPOSITORY" "${COMMIT:-$BRANCH}"
git checkout --quiet --force --detach FETCH_HEAD
bash -euo pipefail -c "$INSTALL"
echo "code at $(git rev-parse HEAD)"
