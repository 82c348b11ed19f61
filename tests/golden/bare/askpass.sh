#!/bin/sh
# git asks here for the user's name and the password of a private repository; both come from the run's environment.
case "$1" in
  Username*) echo x-access-token ;;
  *) printf '%s\n' "${GIT_TOKEN-${GITHUB_TOKEN-}}" ;;
esac
