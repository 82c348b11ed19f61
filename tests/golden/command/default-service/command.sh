#!/bin/bash
# Prepares this worker and starts the run in a detached screen named `model`. A live run is left unchanged.
# Exit status: 80 a program is missing, 81 no such repository or branch, 82 it could not be fetched,
# 83 no W&B key, 84 the screen did not start; or that of a failed setup command.
# shellcheck disable=SC2016  # Texts in single quotes are for the shell that reads them later.
set -uo pipefail
base="$HOME/.tpucare-model"
repository=https://github.com/HomebrewNLP/HomebrewNLP-Jax
branch=main
folder="$HOME/"HomebrewNLP-Jax
fresh="$base/fresh"
export PATH="$HOME/.local/bin:$PATH"
# The mark of a run, if one executes this script: processes of the setup are not part of a run.
unset TPUCARE_MODEL
# Beside this script; in the home if this script has no file.
delivered="$(realpath -- "${BASH_SOURCE[0]:-$HOME/.tpucare-command}").netrc"

fail() {
  local status=$1
  shift
  printf 'tpucare: %s\n' "$*" >&2
  exit "$status"
}

if ! { mkdir -p "$base" && chmod 700 "$base"; }; then
  fail 80 "$base cannot be made"
fi

# A second call waits for the first, and then finds its run. No process that is started here inherits this lock.
exec 8>>"$base/setup.lock"
flock 8 || fail 80 'flock is missing'

# --- a live run is left unchanged ---

# A run is live while a process of it holds its lock or has its mark: a process that was started with closed
# descriptors, as by Python's subprocess, has only the mark.
is_locked() {
  # Shared, so that two simultaneous checks do not take each other for the run.
  ! flock -s -n "$HOME/.tpucare-model/run.lock" true
}

# Called from a shell that a run left behind, this check and its ancestors have the mark, too, and do not count.
is_marked() {
  local path pid=$$ own=' '
  while [ "$pid" -gt 1 ]; do
    own+="$pid "
    [[ $(cat "/proc/$pid/status" 2>/dev/null) =~ PPid:[[:space:]]+([0-9]+) ]] || break
    pid=${BASH_REMATCH[1]}
  done
  while IFS= read -r path; do
    path=${path%/environ}
    [[ $own == *" ${path##*/} "* ]] || return 0
  done < <(exec env -u TPUCARE_MODEL grep -lzxF -e "TPUCARE_MODEL=$HOME" /proc/[0-9]*/environ 2>/dev/null)
  return 1
}

is_live() {
  is_locked || is_marked
}

if is_live; then
  rm -f "$delivered"
  echo 'tpucare: the run in screen "model" is live; it was left unchanged'
  exit 0
fi
rm -f "$base/wanted"

# --- programs ---

missing=()
command -v git >/dev/null || missing+=(git)
command -v screen >/dev/null || missing+=(screen)
command -v python3 >/dev/null || missing+=(python3)
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

# In a VM's first minutes unattended upgrades hold dpkg's lock: wait for it.
if [ -n "${missing[*]-}" ]; then
  apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=-1)
  as_root "${apt[@]}" update </dev/null 8>&-
  as_root "${apt[@]}" --fix-broken install -y "${missing[@]}" </dev/null 8>&- ||
    fail 80 "apt-get could not install ${missing[*]}"
fi

# A screen of that name without our lock is not ours. The screen of a run that just ended needs a moment.
for pause in 0.2 0.5 1 2 0; do
  screen -ls 2>/dev/null | grep -v '(Dead' | grep -q '[0-9]\.model[[:space:]]' || break
  [ "$pause" != 0 ] || fail 84 'a screen named "model", not started by tpucare, is in the way: end it first'
  sleep "$pause"
done

# --- the repository: the old clone stays until the new one is complete ---

quiet_git() {
  LC_ALL=C GIT_TERMINAL_PROMPT=0 \
    GIT_SSH_COMMAND="${GIT_SSH_COMMAND:-ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new}" \
    git -c advice.detachedHead=false "$@" </dev/null 2>"$base/git.err" 8>&-
}

for pause in 1 3 0; do
  rm -rf "$fresh"
  if quiet_git clone -q --depth 1 --branch "$branch" -- "$repository" "$fresh"; then break; fi
  if grep -qiE 'remote branch .* not found|could not find remote branch' "$base/git.err"; then
    fail 81 "$repository has no branch or tag named $branch"
  fi
  if grep -qiE 'not found|does not exist|not appear to be a git repository|could not read Username|Authentication failed|Permission denied' "$base/git.err" &&
    ! grep -qiE 'could not resolve' "$base/git.err"; then
    fail 81 "$repository does not exist, or is private: $(grep -iE '^(fatal|error|remote)' "$base/git.err" | head -n 1)"
  fi
  [ "$pause" != 0 ] || fail 82 "$repository cannot be fetched: $(tail -n 1 "$base/git.err")"
  sleep "$pause"
done
if ! { rm -rf "$folder" && mv -T "$fresh" "$folder" && cd "$folder"; }; then
  fail 82 "$folder cannot be replaced"
fi

# --- W&B: the key is in a file of its own, beside this script ---

netrc="${NETRC:-$HOME/.netrc}"

knows_machine() {
  awk -v machine=api.wandb.ai '{ for (i = 1; i < NF; i++) if ($i == "machine" && $(i + 1) == machine) found = 1 } END { exit !found }' "$netrc" 2>/dev/null
}

# Replaces entries of the same machine; the new one comes first, since a `default` entry ends the search.
write_login() {
  local machine=$1 key=$2
  (
    umask 077
    {
      printf 'machine %s\n  login user\n  password %s\n' "$machine" "$key"
      if [ -f "$netrc" ]; then
        awk -v machine="$machine" '
          $1 == "machine" { skip = ($2 == machine) }
          $1 == "default" || $1 == "macdef" { skip = 0 }
          !skip' "$netrc"
      fi
    } >"$netrc.tpucare" && mv -f "$netrc.tpucare" "$netrc"
  ) || fail 83 "$netrc cannot be written"
}

if [ ! -s "$delivered" ] && [ -z "${WANDB_API_KEY:-}" ] && ! knows_machine; then
  fail 83 "no W&B key: $delivered is not there (send_to_tpu delivers it with the unchanged text of exec_command), WANDB_API_KEY is not set, and $netrc has no entry for "api.wandb.ai
fi
if ! command -v wandb >/dev/null && ! python3 -c 'import wandb' 2>/dev/null; then
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --upgrade 'wandb<1' </dev/null 8>&- ||
    fail 80 'wandb could not be installed'
fi
if [ -s "$delivered" ]; then
  key=$(awk '$1 == "password" { print $2 }' "$delivered")
  write_login api.wandb.ai "$key"
  # The default service of this version of wandb may have another name.
  other=$(python3 -c 'import urllib.parse, wandb; print(urllib.parse.urlsplit(wandb.Settings().base_url).netloc)' 2>/dev/null)
  if [[ $other =~ ^[A-Za-z0-9.:-]+$ && $other != api.wandb.ai ]]; then
    write_login "$other" "$key"
  fi
  unset key
  rm -f "$delivered"
fi

# --- setup; the run gets its exported variables, also after a reboot ---

save_environment() (
  unset OLDPWD PWD SHLVL TERM TERMCAP STY WINDOW XDG_RUNTIME_DIR XDG_SESSION_ID DBUS_SESSION_BUS_ADDRESS
  unset SSH_AUTH_SOCK SSH_CLIENT SSH_CONNECTION SSH_ORIGINAL_COMMAND SSH_TTY
  export -n BASHOPTS SHELLOPTS
  umask 077
  export -p >"$base/env.new" && mv -f "$base/env.new" "$base/env"
)

save_environment || fail 80 "$base cannot be written"
(
  exec 8>&-
  set +u +o pipefail
  trap 'setup_status=$?; save_environment; exit "$setup_status"' EXIT
  eval '(bash setup.sh; exit 0)'
) </dev/null
setup_status=$?
[ "$setup_status" -eq 0 ] || fail "$setup_status" "the setup command failed with exit status $setup_status"

# --- start ---

printf '%s' '#!/bin/bash
# The run in screen `model`: `start` starts it, `boot` starts it again after a reboot, `run` is the screen'"'"'s command.
tpucare_model="$HOME/.tpucare-model"

# A run is live while a process of it holds its lock or has its mark: a process that was started with closed
# descriptors, as by Python'"'"'s subprocess, has only the mark.
is_locked() {
  # Shared, so that two simultaneous checks do not take each other for the run.
  ! flock -s -n "$HOME/.tpucare-model/run.lock" true
}

# Called from a shell that a run left behind, this check and its ancestors have the mark, too, and do not count.
is_marked() {
  local path pid=$$ own='"'"' '"'"'
  while [ "$pid" -gt 1 ]; do
    own+="$pid "
    [[ $(cat "/proc/$pid/status" 2>/dev/null) =~ PPid:[[:space:]]+([0-9]+) ]] || break
    pid=${BASH_REMATCH[1]}
  done
  while IFS= read -r path; do
    path=${path%/environ}
    [[ $own == *" ${path##*/} "* ]] || return 0
  done < <(exec env -u TPUCARE_MODEL grep -lzxF -e "TPUCARE_MODEL=$HOME" /proc/[0-9]*/environ 2>/dev/null)
  return 1
}

is_live() {
  is_locked || is_marked
}

# `screen -dmS` returns before the command starts, so its exit status says nothing.
start() {
  rm -f "$tpucare_model/exit" "$tpucare_model/screen"
  : >"$tpucare_model/wanted"
  screen -h 1000 -dmS model bash "$tpucare_model/model.sh" run </dev/null >/dev/null 2>&1 8>&- || return 1
  for _ in {1..100}; do
    if is_locked || [ -e "$tpucare_model/exit" ]; then return 0; fi
    sleep 0.1
  done
  rm -f "$tpucare_model/wanted"
  return 1
}

boot() {
  # A call that prepares a run at this moment starts it itself.
  exec 8>>"$tpucare_model/setup.lock"
  if ! flock -n 8 || [ ! -e "$tpucare_model/wanted" ] || is_live; then exit 0; fi
  # shellcheck source=/dev/null
  . "$tpucare_model/env"
  # tpucare stopped this run, so only tpucare starts the next one.
  if [ -n "${TPUCARE_RUN:-}" ] && [ -e "$HOME/.tpucare/$TPUCARE_RUN/stopped" ]; then exit 0; fi
  start
}

# The screen'"'"'s content is lost with it. Its server works asynchronously, so wait until it has read the last output.
keep_screen() {
  [ -n "${STY:-}" ] || return
  sleep 0.2
  timeout 5 screen -S "$STY" -p 0 -X hardcopy -h "$tpucare_model/screen" </dev/null >/dev/null 2>&1 9>&- || return
  for _ in {1..20}; do
    [ ! -s "$tpucare_model/screen" ] || return
    sleep 0.1
  done
}

# All processes started here inherit lock and mark: the run is live as long as one of them is alive.
run() {
  exec 9>>"$tpucare_model/run.lock"
  # A check (`is_locked`) holds it for an instant.
  flock -w 10 9 || exit 0
  # shellcheck source=/dev/null
  . "$tpucare_model/env"
  export TPUCARE_MODEL="$HOME"
  local status signalled=
  trap '"'"'signalled=yes '"'"' TERM HUP
  cd "$HOME/"HomebrewNLP-Jax || exit 72
  bash -c '"'"'bash run.sh'"'"'
  status=$?
  keep_screen
  printf '"'"'%s\n%s\n'"'"' "$status" "${TPUCARE_RUN:-}" >"$tpucare_model/exit.new"
  mv -f "$tpucare_model/exit.new" "$tpucare_model/exit"
  # A run that ended is over; a run that a shutdown ended starts again.
  case "$signalled$status" in
    yes* | 129 | 143) ;;
    *) rm -f "$tpucare_model/wanted" ;;
  esac
}

"$1"
' >"$base/model.sh" || fail 80 "$base cannot be written"

at_boot='@reboot /bin/bash "$HOME/.tpucare-model/model.sh" boot'
if ! crontab -l 2>/dev/null | grep -qxF "$at_boot"; then
  { crontab -l 2>/dev/null; printf '%s\n' "$at_boot"; } | crontab - 2>/dev/null ||
    echo 'tpucare: the crontab cannot be written: the run will not start again after a reboot' >&2
fi

bash "$base/model.sh" start || fail 84 'the screen named "model" did not start'
echo 'tpucare: the run is started in screen "model"'
