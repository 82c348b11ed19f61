#!/usr/bin/env bash
# End the run: send SIGTERM, so that it can save, and SIGKILL after STOP_SECONDS.
set -euo pipefail
source "$(dirname "$0")/settings.sh"

is_live || exit 0
# Never Ctrl-C (SIGINT): it leaves TPU chips unusable.
# A new run takes the lock before it writes its pid; until then the file has the last run's pid, or none.
for _ in {1..50}; do
  pid=$(cat "$STATE/pid" 2>/dev/null || true)
  if kill -TERM -- "-$pid" 2>/dev/null || ! is_live; then break; fi
  sleep 0.1
done
if ! flock --timeout "${STOP_SECONDS:-60}" "$STATE/lock" true; then
  kill -KILL -- "-$pid" 2>/dev/null || true
  flock --timeout 30 "$STATE/lock" true || die "processes of the run are still alive: $(fuser "$STATE/lock" 2>/dev/null)"
fi
echo "stopped"
