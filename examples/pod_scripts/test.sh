#!/usr/bin/env bash
# Do all hosts and their chips find each other? Run it on all workers at once: alone, each would wait for the others.
set -euo pipefail
source "$(dirname "$0")/settings.sh"

! is_live || die "a run is live, and holds the chips: stop.sh ends it"
cd "$CODE" 2>/dev/null || die "there is no clone yet: run install.sh"
timeout "${TEST_SECONDS:-300}" bash -euo pipefail -c "$TEST" || die "the test failed with exit status $?"
