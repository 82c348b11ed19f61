"""
Where a secret is while it is used, and what a hostile job can do to whoever looks at it: everything that is kept or
shown is searched, on both sides.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.kits.deployment import Deployment, deployment, environment_in, environment_of

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

SECRET = "s3cr3t-'$(id)\"`id`-value"
HOSTILE = r"""
head -c 3000000 /dev/zero | tr '\0' 'z'; echo
touch "$(printf 'bad\033[2J\nname')"
cat no-such-file >&2 || true
printf '\033]0;pwned\007\033[2J\033[31mred\r\233 and plain\n'
for n in $(seq 100000); do echo "step $n"; sleep 0.2; done
"""


def commands_and_environments(word: str) -> set[tuple[str, str]]:
    """(where, name of the process, and its run if it has one) of every process in which *word* stands."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        for part in ("cmdline", "environ"):
            try:
                text = (folder / part).read_bytes()
                if word.encode() in text:
                    # Of what was just read, where it can be: a process that ends has an empty environment and still
                    # a name.
                    seen = environment_in(text) if part == "environ" else environment_of(int(folder.name))
                    run = seen.get("TPUCARE_RUN", "")
                    found.add((part, run or (folder / "comm").read_text().strip()))
            except OSError:
                continue
    return found


def files_with(folder: Path, word: bytes) -> list[Path]:
    walked = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return [path for path in walked if path.is_file() and not path.is_symlink() and word in path.read_bytes()]


def open_to_others(folder: Path) -> list[str]:
    found = [Path(root) / name for root, folders, names in os.walk(folder) for name in [*folders, *names]]
    modes = [(path, path.lstat().st_mode) for path in found]
    return [f"{path} {stat.filemode(mode)}" for path, mode in modes if mode & 0o077 and not stat.S_ISLNK(mode)]


def told_by_commands(home: Deployment) -> str:
    asked = [("events",), ("events", "--json"), ("status",), ("status", "--json"), ("logs", "pod-0"), ("plan",)]
    return "".join(home.cli(*words).out for words in asked)


def test_a_secret_of_a_hostile_job(tmp_path: Path) -> None:
    """The secret is a file of the service manager's, so that not even the daemon's own environment holds it."""
    credentials = tmp_path / "credentials"
    credentials.mkdir(mode=0o700)
    (credentials / "TRAINING_KEY").write_text(SECRET)
    with deployment(tmp_path / "house", pace={"CREDENTIALS_DIRECTORY": str(credentials)}) as home:
        home.secrets = (SECRET,)
        home.declare("pod", run=HOSTILE, job={"secrets": ["TRAINING_KEY"]})
        home.start("--log-level", "debug")
        seen: set[tuple[str, str]] = set()

        def look() -> bool:
            seen.update(commands_and_environments(SECRET))
            return "step 5" in home.log("pod-0")

        home.await_(look, "the job counts")
        assert seen == {("environ", "pod-0-a0.1")}, "the run's own environment, and no other process"

        holders = files_with(home.folder, SECRET.encode())
        assert [path.name for path in holders] == ["env"], holders
        worker = holders[0].parents[1]
        assert worker.name == ".tpucare"
        assert [one for one in open_to_others(worker) if not {"work", "tools"} & set(Path(one).parent.parts)] == []
        assert open_to_others(home.state) == []
        told = told_by_commands(home)
        assert SECRET not in told + home.daemon_log.read_text()
        assert "and plain" in home.log("pod-0")
        assert not [char for char in told if char != "\n" and not char.isprintable() and char != "\t"]
        assert home.cli("exec", "pod-0", "--", "true", want=None).status in (0, 1)
        kept = sum(path.stat().st_size for path in (home.state / "logs").rglob("*") if path.is_file())
        assert kept < 4_000_000, "a flood is brought in parts"
