# shellcheck shell=bash disable=SC2034  # Sourced by the other scripts, which read these values.
# Precedence: the environment, then values given on this worker before, then the defaults below.
CODE="$HOME/pod-code"
STATE="$HOME/pod-run"
mkdir -p "$STATE"
# shellcheck source=/dev/null
if [[ -f $STATE/given ]]; then source "$STATE/given"; fi

: "${REPOSITORY:=https://github.com/YOU/YOUR-TRAINING}"
: "${BRANCH:=main}"
# A place that all hosts share: gs://BUCKET/PATH, or a mounted folder. The run finds it as CHECKPOINT.
: "${CHECKPOINT:=${TPUCARE_CHECKPOINT:-gs://MY-BUCKET/my-pod}}"
# Commands, run by bash in the clone.
: "${INSTALL:=python3 -m pip install --quiet -r requirements.txt}"
: "${TEST:=python3 -c 'import jax; jax.distributed.initialize(); print(jax.process_index(), jax.device_count())'}"
# Sees START_STEP: the step of the newest complete checkpoint, empty for a new training.
: "${TRAIN:=python3 train.py}"

export CHECKPOINT

# shellcheck disable=SC2016  # It is expanded where it is sourced.
for name in REPOSITORY BRANCH CHECKPOINT INSTALL TEST TRAIN; do
  printf '[[ -n ${%s:-} ]] || %s=%q\n' "$name" "$name" "${!name}"
done >"$STATE/given.$$"
mv "$STATE/given.$$" "$STATE/given"

die() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# The run and all its children hold the lock, so it is right after a crash, too. A check takes it shared: two checks at
# once must not mistake each other for the run.
is_live() {
  ! flock --shared --nonblock "$STATE/lock" true
}

# Prints the step of the newest complete checkpoint, or nothing if none exists. A bucket that cannot be read is an
# error: treated as an empty bucket, it would start the training over.
newest_step() {
  local listing
  if [[ $CHECKPOINT == gs://* ]]; then
    # In a bucket, which has no rename, orbax marks a complete folder with this file.
    if ! listing=$(gcloud storage ls "$CHECKPOINT/*/commit_success.txt" 2>&1); then
      [[ $listing == *'matched no objects'* ]] || die "cannot list $CHECKPOINT: $listing"
      return 0
    fi
    awk -F/ '$(NF - 1) ~ /^[0-9]+$/ { print $(NF - 1) + 0 }' <<<"$listing" | sort -n | tail -n 1
  elif [[ -d $CHECKPOINT ]]; then
    find "$CHECKPOINT" -mindepth 1 -maxdepth 1 -type d -regex '.*/[0-9]+' ! -empty -printf '%f\n' | sort -n | tail -n 1
  fi
}
