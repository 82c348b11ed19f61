#!/bin/sh
# git calls this for the user's name and the password of a private repository; both come from the run's environment.
# Only the host of the job's own repository gets them: a redirect or a submodule may name another host.
own=''
asked=${1#*\'}
asked=${asked%%\'*}
host=${asked#*://}
host=${host%%/*}
[ -n "$own" ] && [ "${asked%%://*}://${host##*@}" = "$own" ] || exit 1
case "$1" in
  Username*) echo x-access-token ;;
  *) printf '%s\n' "${GIT_TOKEN-${GITHUB_TOKEN-}}" ;;
esac
