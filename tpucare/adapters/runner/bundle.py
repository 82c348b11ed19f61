"""
Packs a local folder, the job's code, for workers; the same files give the same bytes.

Inside a git work tree the files that git does not ignore are packed (tracked and new ones), elsewhere every file;
`.git` never. Ignored files may be secret or huge, so a work tree that git cannot list is refused and never walked.
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

# A repository may come from a stranger, and its own config can name commands (`core.fsmonitor`, a remote helper for
# objects that a partial clone lacks); even the files of a plain clone may contain a bare repository. The command line
# overrides every config. GIT_NO_LAZY_FETCH needs git 2.44; before that, the empty list of protocols prevents a fetch.
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
"""Variables that git needs to be found and to read the daemon user's config (`safe.directory`); no secrets."""


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """A packed folder; the name has a digest of the content."""

    name: str
    content: bytes


def pack(folder: str, private: Private = EVERYWHERE_PRIVATE, limit: int = LIMIT_BYTES) -> PackedFolder:
    """
    Pack *folder* (an absolute path). `limit`: bytes of all its files, since each worker gets them all.

    Raises: ConfigError: not a folder, unreadable, private or with private files, or too large (names the largest).
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
    return PackedFolder(f"bundle.{hashlib.sha256(content).hexdigest()[:16]}.tar.gz", content)


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
                # A hard link: packed as a file of its own, so that the order of the names does not matter.
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", os.fstat(stream.fileno()).st_size
            archive.addfile(info, stream)
        return
    info = archive.gettarinfo(root / name, arcname=name)
    if info is not None and (info.issym() or info.isdir()):  # Not sockets, pipes and devices.
        archive.addfile(_cleaned(info))


def _cleaned(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """*info* without the fields that differ between two copies of the same files."""
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
            f"job.workdir: git ignores every file in {root}, so no file can be sent; "
            "run `git init` there to make it a repository of its own"
        )
    return names


def _in_work_tree(root: Path) -> bool:
    """True below a folder with `.git`, as git searches it, even if git is missing or may not read the repository."""
    for folder in (root, *root.parents):
        if os.path.lexists(folder / ".git"):
            return True
        if os.path.ismount(folder):
            break
    return False


def _names_by_git(root: Path) -> list[str]:
    """Raises: ConfigError: git is not installed, too slow, or refuses the repository."""
    command = [*GIT, "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    problem = f"job.workdir: {root} is in a git work tree, and git cannot list its files"
    env = {name: os.environ[name] for name in GIT_INHERITS if name in os.environ} | GIT_REFUSES
    try:
        listed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS, check=False, env=env
        )
    except OSError as error:
        raise ConfigError(f"{problem}: git cannot be run ({error.strerror}); install it") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{problem}: no answer within {GIT_SECONDS} s") from None
    # Git ignores a `.gitignore` that it cannot read and only warns: the files that it should hide would be sent.
    if listed.returncode or listed.stderr:
        raise ConfigError(f"{problem}: {' '.join(os.fsdecode(listed.stderr).split())[:SAID_LIMIT]}")
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    # The list also has files whose deletion is not committed; a submodule is listed as a folder.
    return [name for name in names if os.path.lexists(root / name) and not _is_folder(root / name)]


def _names_by_walking(root: Path, private: Private) -> list[str]:
    """Raises: ConfigError: a file or folder below is private; raised before any file is read."""
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
            f"job.workdir: {root} has {total >> 20} MiB, more than the limit of {limit >> 20} MiB per worker; "
            f"list unneeded files in .gitignore (largest: {largest})"
        )


def stream(files: Iterable[tuple[str, bytes, int]]) -> bytes:
    """
    Files (path, content, mode) as one tar stream, with the empty file `complete` at its end.

    GNU tar accepts a stream that was cut between two members as complete, so the receiver checks for that file.
    """
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content, mode in (*files, ("complete", b"", 0o600)):
            info = tarfile.TarInfo(path)
            info.mode = mode
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()
