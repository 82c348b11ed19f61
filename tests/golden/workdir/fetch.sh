#!/bin/bash
# Bring the job's code to this worker. What is there already, of the same commit or bundle, is left alone.
set -euo pipefail
base="$HOME/.tpucare"
work="$base/work"
source="$base/work.source"
mkdir -p "$work"
bundle=bundle.0123456789abcdef.tar.gz

# What the job made where the bundle has something else is kept under another name: it may be worth days.
set_aside() {
  local number=1
  rmdir -- "$work/$1" 2>/dev/null && return
  while [ -e "$work/$1.before-$number" ]; do number=$((number + 1)); done
  mv -T -- "$work/$1" "$work/$1.before-$number"
  printf '%s is in the way of the new code, and is kept as %s.before-%s\n' "$1" "$1" "$number"
}

make_way() {
  local name parent
  while IFS= read -r name; do
    parent=$name
    while [[ $parent == */* ]]; do
      parent=${parent%/*}
      if [ ! -d "$work/$parent" ] && { [ -e "$work/$parent" ] || [ -L "$work/$parent" ]; }; then set_aside "$parent"; fi
    done
    if [[ $name != */ ]] && [ -d "$work/$name" ] && [ ! -L "$work/$name" ]; then set_aside "$name"; fi
  done
}

if [ "$(cat "$source" 2>/dev/null)" != "$bundle" ]; then
  rm -f "$source"
  # Files that the last bundle had and this one has not are removed; what the job itself made stays.
  # Names as they are: tar would write é as \303\251 in a locale that does not have it.
  tar --quoting-style=literal -tzf "$base/$bundle" | LC_ALL=C sort >"$base/work.new"
  if [ -f "$base/work.files" ]; then
    LC_ALL=C comm -23 "$base/work.files" "$base/work.new" | while IFS= read -r name; do
      { [ -d "$work/$name" ] && [ ! -L "$work/$name" ]; } || rm -f -- "$work/$name"
    done
  fi
  make_way <"$base/work.new"
  tar -xzof "$base/$bundle" -C "$work"
  mv "$base/work.new" "$base/work.files"
  printf '%s' "$bundle" >"$source"
  for old in "$base"/bundle.*.tar.gz; do
    [ "$old" = "$base/$bundle" ] || rm -f -- "$old"
  done
fi
