#!/usr/bin/env bash
# Run on your machine: sends these scripts to all workers of a slot, and runs one of them on all workers at once.
#   bash on_all.sh my-pod install.sh
# Values of settings.sh that your environment sets are sent along.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
(($# >= 2)) || { sed -n 's/^# \{0,1\}//; 2,4p' "$0" >&2; exit 2; }
slot=$1 script=$2
shift 2
[[ -f $here/$script ]] || { echo "there is no $here/$script" >&2; exit 2; }

# Workers that ask separately could get different commits, or different newest steps.
if [[ $script == install.sh || $script == update.sh ]] && [[ -n ${REPOSITORY:-} && -z ${COMMIT:-} ]]; then
  COMMIT=$(git ls-remote --exit-code -- "$REPOSITORY" "refs/heads/${BRANCH:-main}" | cut -f 1)
fi

settings=
for name in REPOSITORY BRANCH COMMIT CHECKPOINT INSTALL TEST TEST_SECONDS TRAIN STOP_SECONDS; do
  [[ -z ${!name:-} ]] || settings+="export $name=$(printf %q "${!name}"); "
done
archive=$(cd "$here" && tar -cz -- *.sh | base64 -w 0)
send="set -eo pipefail; mkdir -p ~/pod-scripts; base64 -d <<<$archive | tar -xz -C ~/pod-scripts; $settings"

on() {
  local workers=$1
  shift
  tpucare exec --worker "$workers" --timeout "${TIMEOUT:-3600}" "$slot" -- bash -c "$send$(printf 'bash ~/pod-scripts/%s' "$(printf '%q ' "$@")")"
}

if [[ $script == resume.sh && $# -eq 0 ]]; then
  step=$(on 0 resume.sh --newest)
  [[ -z $step ]] || set -- "$step"
fi
on all "$script" "$@"
