"""
The files that a worker with a mount namespace has for itself: /dev with its chips, /etc/hosts and the boot id.

`write` makes them in a folder, with a table for `mount --all`: one process mounts them all, which adds 10 ms to a boot.
The chips are empty files: programs count them or hold them open, and none can be used.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tpucare.model.local_files import replace_file

BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""A machine has a boot id of its own, new at each boot, by which launchers recognise a reboot."""

METADATA_NAMES = ("metadata.google.internal", "metadata")

_HOSTS, _GROUPS = "/etc/hosts", "/etc/group"
# In a user namespace no device can be made, so these are the real machine's; /dev/fuse is for gcsfuse.
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "fuse")
_LINKS: Mapping[str, str] = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
# A devpts of its own, else `screen` finds no terminal under the new /dev. No `gid=`: a user namespace knows one group.
_DEVPTS = "newinstance,ptmxmode=0666,mode=620"


def chips_folder(folder: Path) -> Path:
    """The folder that is /dev on a worker with a mount namespace."""
    return folder / "dev"


def mount_table(folder: Path) -> Path:
    return folder / "mounts"


def write(folder: Path, *, boot_id: str, chips: int, metadata_address: str, one_group: bool) -> None:
    """
    Write everything anew.

    metadata_address: METADATA_NAMES resolve to it
    one_group:        for a user namespace, where sshd cannot give a terminal to group `tty`, and ends a session for it
    """
    dev = chips_folder(folder)
    shutil.rmtree(dev, ignore_errors=True)
    for inner in (dev, dev / "pts", dev / "shm"):
        inner.mkdir()
        inner.chmod(0o755)
    devices = [name for name in _DEVICES if Path("/dev", name).exists()]
    for name in (*devices, *(f"accel{number}" for number in range(chips))):
        (dev / name).touch()
    for name, target in _LINKS.items():
        (dev / name).symlink_to(target)
    files = {BOOT_ID: f"{boot_id}\n"}
    if (hosts := Path(_HOSTS)).exists():
        known = hosts.read_text(errors="surrogateescape").rstrip()
        files[_HOSTS] = f"{known}\n{metadata_address} {' '.join(METADATA_NAMES)}\n"
    if one_group:
        groups = Path(_GROUPS).read_text(errors="surrogateescape").splitlines(keepends=True)
        files[_GROUPS] = "".join(line for line in groups if not line.startswith("tty:"))
    for place, text in files.items():
        replace_file(folder / Path(place).name, text.encode(errors="surrogateescape"), mode=0o644, durable=False)
    mounts = [
        *((f"/dev/{name}", dev / name, "none", "bind") for name in devices),
        ("devpts", dev / "pts", "devpts", _DEVPTS),
        ("tmpfs", dev / "shm", "tmpfs", "mode=1777"),
        (dev, "/dev", "none", "rbind"),
        *((folder / Path(place).name, place, "none", "bind") for place in files),
    ]
    lines = (" ".join(_escaped(str(part)) for part in mount) + " 0 0\n" for mount in mounts)
    mount_table(folder).write_text("".join(lines))


def _escaped(part: str) -> str:
    """A field of a mount table, in which white space separates fields."""
    return "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\" else letter for letter in part)
