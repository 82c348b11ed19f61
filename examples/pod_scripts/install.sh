#!/usr/bin/env bash
# Run once on every new worker: installs programs, the code, and its dependencies.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/settings.sh"

missing=()
for program in git screen python3; do
  command -v "$program" >/dev/null || missing+=("$program")
done
if ((${#missing[@]})); then
  # In a VM's first minutes, unattended upgrades hold dpkg's lock: wait for it.
  sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 update
  sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 install -y "${missing[@]}"
fi

[[ -d $CODE/.git ]] || git clone --quiet --depth 1 --branch "$BRANCH" -- "$REPOSITORY" "$CODE"
exec bash "$here/update.sh"
