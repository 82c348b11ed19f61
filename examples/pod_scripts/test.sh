#!/usr/bin/env bash
# Tests whether all hosts and chips find each other. Run it on all workers at once: a single one waits for the others.
set -euo pipefail
source "$(dirname "$0")/settings.sh"

! is_live || die "a live run holds the chips: stop.sh ends it"
cd "$CODE" 2>/dev/null || die "there is no clone yet: run install.sh"
timeout "${TEST_SECONDS:-300}" bash -euo pipefail -c "$TEST" || die "the test failed with exit status $?"
