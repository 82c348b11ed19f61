#!/usr/bin/env bash
# The newest commit of BRANCH, or COMMIT where it is given: on_all.sh gives the same one to all workers. A run that is
# live keeps what it has loaded; resume.sh starts it again with the new code.
set -euo pipefail
source "$(dirname "$0")/settings.sh"

cd "$CODE" 2>/dev/null || die "there is no clone yet: run install.sh"
git fetch --quiet --depth 1 -- "$REPOSITORY" "${COMMIT:-$BRANCH}"
git checkout --quiet --force --detach FETCH_HEAD
bash -euo pipefail -c "$INSTALL"
echo "code at $(git rev-parse HEAD)"
