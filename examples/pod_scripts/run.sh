#!/usr/bin/env bash
# Start the training in a screen named `pod`, which survives the end of SSH. A live run is left unchanged.
# run.sh --from STEP  resumes from that checkpoint; resume.sh finds the step.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/settings.sh"

if [[ ${1:-} == --inside ]]; then
  # Inside the screen. Every process started from here on inherits the lock.
  exec 9>>"$STATE/lock" >>"$STATE/log" 2>&1
  # A check holds the lock for an instant; a live run keeps it.
  flock --timeout 10 9 || exit 0
  echo $$ >"$STATE/pid"
  echo "$(date -u +%FT%TZ) begins${START_STEP:+ at step $START_STEP}"
  cd "$CODE"
  status=0
  bash -c "$TRAIN" || status=$?
  echo "$status" >"$STATE/exit"
  echo "$(date -u +%FT%TZ) ended with exit status $status"
  exit "$status"
fi

if is_live; then
  echo "the run is live; it was left unchanged; its log: $STATE/log"
  exit 0
fi
[[ -d $CODE ]] || die "there is no clone yet: run install.sh"
if [[ ${1:-} == --from ]]; then
  START_STEP=$2
else
  START_STEP=
  found=$(newest_step)
  [[ -z $found ]] || die "$CHECKPOINT has step $found: resume.sh resumes from there; to start over, change CHECKPOINT"
fi
export START_STEP TRAIN
rm -f "$STATE/exit"
screen -dmS pod bash "$here/run.sh" --inside
# `screen -dmS` returns before the command starts, so its exit status says nothing.
for _ in {1..100}; do
  if is_live || [[ -e $STATE/exit ]]; then
    echo "started${START_STEP:+ from step $START_STEP}; its log: $STATE/log"
    exit 0
  fi
  sleep 0.1
done
die "the screen did not start; see $STATE/log"
