"""
Asks the repository for the commit of the branch, with the environment of the run, which has the credentials.

Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import os

import files
import processes


def main(arguments: list[str]) -> None:
    """`TOKEN`: become that run's resolve script, which prints `commit <hash>`."""
    folder = os.path.join(processes.home(), arguments[0])
    env = {**os.environ, **files.read_environment(folder)}
    os.execve("/bin/bash", ["bash", os.path.join(folder, "resolve.sh")], env)
