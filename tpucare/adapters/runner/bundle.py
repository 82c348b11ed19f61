"""
A local folder, packed so that the same files give the same bytes, to be sent to workers as the job's code.

Inside a git work tree what git would not ignore is packed (tracked and new files), elsewhere everything; `.git` never.
What git ignores may be secret or huge, so a work tree that git says nothing of is refused and never walked.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpucare.model.errors import ConfigError
from tpucare.model.local_files import EVERYWHERE_PRIVATE, NEVER_SENT, Private, open_below

LIMIT_BYTES = 256 << 20
GIT_SECONDS = 30
SAID_LIMIT = 500

# A repository may be anybody's, and its own config can name commands (`core.fsmonitor`, a remote helper for objects
# that a partial clone lacks); a bare repository may even lie among the files of a plain clone. The command line counts
# before any config. GIT_NO_LAZY_FETCH is of git 2.44; before it, no protocol is left to fetch with.
GIT = (
    *("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"),
    *("-c", "safe.bareRepository=explicit", "-c", "protocol.allow=never"),
)
GIT_REFUSES = {
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
}
GIT_INHERITS = ("PATH", "HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
"""Where git is, and what the daemon's own user trusts (`safe.directory`); no secret of the daemon."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A packed folder; the name holds the digest of its content."""

    name: str
    content: bytes


def pack(folder: str, private: Private = EVERYWHERE_PRIVATE, limit: int = LIMIT_BYTES) -> Bundle:
    """
    Pack *folder* (an absolute path). `limit` is in bytes of its files, since each worker gets them all.

    Raises: ConfigError: not a folder, unreadable, private or with private files, or too large; the largest are named.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"job.workdir: {folder} is not a folder")
    if refusal := private.refusal(root):
        raise ConfigError(f"job.workdir: {folder} {refusal}")
    try:
        names = _names(root, private)
        _check_size(root, names, limit)
        content = _packed(root, names, private)
    except OSError as error:
        named = f" ({error.filename})" if error.filename else ""
        raise ConfigError(f"job.workdir: {folder}: {error.strerror or error}{named}") from error
    return Bundle(f"bundle.{hashlib.sha256(content).hexdigest()[:16]}.tar.gz", content)


def _packed(root: Path, names: list[str], private: Private) -> bytes:
    target = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=target, mode="wb", compresslevel=3, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            _add(archive, root, name, private)
    return target.getvalue()


def _add(archive: tarfile.TarFile, root: Path, name: str, private: Private) -> None:
    if stat.S_ISREG(os.lstat(root / name).st_mode):
        with open_below(root, name, private) as stream:
            info = _cleaned(archive.gettarinfo(arcname=name, fileobj=stream))
            if info.islnk():
                # A second name of the same file; which one comes first must not matter.
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", os.fstat(stream.fileno()).st_size
            archive.addfile(info, stream)
        return
    info = archive.gettarinfo(root / name, arcname=name)
    if info is not None and (info.issym() or info.isdir()):  # Sockets, pipes and devices: nothing that code needs.
        archive.addfile(_cleaned(info))


def _cleaned(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between two copies of the same files."""
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.mode & stat.S_IXUSR or info.isdir() else 0o644
    return info


def _names(root: Path, private: Private = EVERYWHERE_PRIVATE) -> list[str]:
    """Paths of files and links below *root*, sorted."""
    if not _in_work_tree(root.resolve()):
        return sorted(_names_by_walking(root, private))
    names = sorted(_names_by_git(root))
    if not names and _names_by_walking(root, private):
        raise ConfigError(
            f"job.workdir: git ignores every file in {root}, so there is nothing to send; "
            "`git init` there makes it a repository of its own"
        )
    return names


def _in_work_tree(root: Path) -> bool:
    """Looked up as git does, but also true where git is missing or may not read what it finds."""
    for folder in (root, *root.parents):
        if os.path.lexists(folder / ".git"):
            return True
        if os.path.ismount(folder):
            break
    return False


def _names_by_git(root: Path) -> list[str]:
    """Raises: ConfigError: git does not tell them: not installed, too slow, or the repository is not to its liking."""
    command = [*GIT, "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    problem = f"job.workdir: {root} is in a git work tree, and git does not say what is ignored there"
    env = {name: os.environ[name] for name in GIT_INHERITS if name in os.environ} | GIT_REFUSES
    try:
        listed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS, check=False, env=env
        )
    except OSError as error:
        raise ConfigError(f"{problem}: git cannot be run ({error.strerror}); install it") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{problem}: no answer within {GIT_SECONDS} s") from None
    # Git goes on without a `.gitignore` that it cannot read, and only says so: what it should hide would be sent.
    if listed.returncode or listed.stderr:
        raise ConfigError(f"{problem}: {' '.join(os.fsdecode(listed.stderr).split())[:SAID_LIMIT]}")
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    # A file that was deleted and not committed is still listed; a submodule is listed as a folder.
    return [name for name in names if os.path.lexists(root / name) and not _is_folder(root / name)]


def _names_by_walking(root: Path, private: Private) -> list[str]:
    """Raises: ConfigError: a folder there is private, or what lies in a folder is: it is named before more is read."""
    real = os.path.realpath(root)
    found = []
    for folder, below, files in os.walk(real):
        for path in (os.path.join(folder, name) for name in (*below, *files)):
            if private.holds(Path(path)) and not os.path.islink(path):
                raise ConfigError(f"job.workdir: {root}: {path} {NEVER_SENT}; name a folder without it")
        links = [name for name in below if os.path.islink(os.path.join(folder, name))]
        below[:] = [name for name in below if name not in (".git", "__pycache__") and name not in links]
        found += [os.path.relpath(os.path.join(folder, name), real) for name in (*files, *links)]
    return found


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _check_size(root: Path, names: list[str], limit: int) -> None:
    sizes = {name: os.lstat(root / name).st_size for name in names}
    total = sum(sizes.values())
    if total > limit:
        largest = ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:3])
        raise ConfigError(
            f"job.workdir: {root} holds {total >> 20} MiB, more than the {limit >> 20} MiB to send to every worker; "
            f"list what is not needed in .gitignore (largest: {largest})"
        )


def stream(files: Iterable[tuple[str, bytes, int]]) -> bytes:
    """
    Files (path, content, mode) as one tar stream, with the empty file `complete` at its end.

    GNU tar takes a stream that was cut between two members for a whole one, so the receiver looks for that file.
    """
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content, mode in (*files, ("complete", b"", 0o600)):
            info = tarfile.TarInfo(path)
            info.mode = mode
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()
