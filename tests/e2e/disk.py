"""
A disk of its own below one folder, that can be turned read-only while files on it are open for writing.

The kernel refuses to remount such a file system read-only, so the disk is broken as disks break: ext4 meets an error
and keeps the file system from being written (`errors=remount-ro`). Needs root, loop devices and the tools of ext4.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE_BYTES = 64 << 20


class Disk:
    """An ext4 file system in an image file, mounted at `folder` (mode 0700) from the start."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder = image, folder
        self.mounted = False
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        folder.mkdir(mode=0o700)
        _run("mkfs.ext4", "-q", str(image))
        self.mount()
        folder.chmod(0o700)

    def mount(self, *options: str) -> None:
        _run("mount", "-o", ",".join(["loop", "errors=remount-ro", *options]), str(self.image), str(self.folder))
        self.mounted = True

    def unmount(self) -> None:
        if self.mounted:
            _run("umount", str(self.folder))
            self.mounted = False

    def remount(self, how: str) -> None:
        """`ro` or `rw`, as an administrator does it; nobody may have a file open for writing."""
        _run("mount", "-o", f"remount,{how}", str(self.folder))

    def fail(self) -> None:
        """It turns read-only under whoever writes to it, and stays so until `replace`."""
        device = Path(_run("findmnt", "-n", "-o", "SOURCE", str(self.folder)).strip())
        Path("/sys/fs/ext4", device.name, "trigger_fs_error").write_text("broken on purpose\n")
        with pytest.raises(OSError, match="Read-only file system"):
            (self.folder / "probe").touch()

    def replace(self) -> None:
        """Another disk takes its place, with what the old one held; nobody may have a file of it open."""
        self.unmount()
        # Workers that booted meanwhile hold the old one in their namespaces until they end: it cannot be repaired.
        image = self.image.with_name(f"{self.image.name}.new")
        shutil.copyfile(self.image, image)
        image.rename(self.image)
        checked = subprocess.run(["e2fsck", "-fy", str(self.image)], capture_output=True, text=True, check=False)
        assert checked.returncode in (0, 1), checked
        self.mount()


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """A disk at *folder*, which must not be there yet; gone at the end. Skips the test where none can be had."""
    if os.geteuid() != 0:
        pytest.skip("a file system can only be mounted by root")
    image = folder.with_name(f"{folder.name}.img")
    try:
        made = Disk(image, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', '') or error}")
    try:
        yield made
    finally:
        made.unmount()
        image.unlink()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
