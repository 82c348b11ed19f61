#!/usr/bin/env bash
# End a live run and resume from the newest complete checkpoint; without a checkpoint, start from the beginning.
# resume.sh STEP      resume from that checkpoint; on_all.sh passes the same step to all workers
# resume.sh --newest  only print the step
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/settings.sh"

if [[ ${1:-} == --newest ]]; then
  newest_step
  exit
fi
bash "$here/stop.sh"
step=${1:-$(newest_step)}
exec bash "$here/run.sh" ${step:+--from "$step"}
