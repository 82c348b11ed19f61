#!/usr/bin/env bash
# End the run if it is live, and go on from the newest complete checkpoint; without one, begin.
# resume.sh STEP      from that checkpoint. on_all.sh gives the same one to all workers
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
