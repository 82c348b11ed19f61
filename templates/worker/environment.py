"""
What a job's set-up made, kept over nodes: declared folders as one archive in a bucket or shared folder.

`restore` fetches an archive beside the job's code and unpacks it into a folder of its own; `adopt` moves it into the
job's folder, if it is of this very set-up; `save` packs and stores it while the job runs. Nothing here fails a run:
whatever is missing, broken or refused means that the set-up runs.

An archive is believed only by its SHA-256, which the daemon keeps: who may write to the bucket may delete archives, not
change an environment. Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time

import files
import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from collections.abc import Iterator
    from typing import BinaryIO

STAGING, PARCEL = "environment.in", "environment.tar.gz"
BLOCK = 1 << 20
LIMIT_BYTES = 64 << 30
# A restore that takes longer is slower than most set-ups.
RESTORE_SECONDS = 300
LOCKS_LIMIT_BYTES = 64 << 20
# Of a secret of many lines (a key) a file may hold some; shorter lines are no secrets by themselves.
LINE_BYTES = 24
SHORTEST_IN_BASE64 = 12
# What the set-up of a Python project depends on, beside the files that its text names.
LOCK_FILES = (
    "Pipfile.lock",
    "conda-lock.yml",
    "environment.yml",
    "pdm.lock",
    "pixi.lock",
    "poetry.lock",
    "pylock.toml",
    "pyproject.toml",
    "requirements.txt",
    "setup.cfg",
    "setup.py",
    "uv.lock",
)


class Refused(Exception):
    """Why an environment is not kept or not used, for people; never with the value of a secret."""


def main(arguments: list[str]) -> None:
    """Pairs: `do` (restore, save), `folder` (of the run), `key` (for save), and the runner's order."""
    order = files.read_pairs(arguments)
    folder = order["folder"]
    if order["do"] == "restore":
        restore(processes.home(), folder, order)
    else:
        os.nice(19)
        save(processes.home(), folder, order)


# --- which environment it is ------------------------------------------------------------------------------------------


def key_of(base: str, folder: str, order: dict[str, str]) -> str:
    """
    Name of the environment that the set-up makes here: of fleet, image, Python, account, set-up and lock files.

    order: `cache_scope` (digest of project, fleet, runtime and set-up with the files of the job), `cache_paths`
    Raises: Refused, OSError: the files that the set-up names cannot be read.
    """
    import pwd

    work = os.path.join(base, "work")
    digest = hashlib.sha256()
    # A venv knows its own path, which follows from the account's home.
    parts = [
        order["cache_scope"],
        order["cache_paths"],
        sys.version,
        os.uname().machine,
        pwd.getpwuid(os.getuid()).pw_dir,
    ]
    parts.append(files.read_text("/etc/os-release"))
    for part in parts:
        digest.update(part.encode() + b"\0")
    left = LOCKS_LIMIT_BYTES
    setup = files.read_text(os.path.join(folder, "setup.sh"), 1 << 18)
    for name in sorted({*LOCK_FILES, *_words(setup)}):
        path = os.path.join(work, name)
        if not os.path.isfile(path) or not _is_below(work, path):
            continue
        left -= os.path.getsize(path)
        if left < 0:
            raise Refused("the files that the set-up names are too large to be read at each start")
        with open(path, "rb") as stream:
            digest.update(name.encode(errors="surrogateescape") + b"\0" + _sha256(stream).encode())
    return digest.hexdigest()


def _words(text: str) -> Iterator[str]:
    """Words of the set-up that may be files of the job: `setup.sh` of `bash setup.sh`, `a.txt` of `pip -r a.txt`."""
    for word in text.replace("=", " ").split():
        clean = word.strip("\"'();&|<>`")
        if clean and not clean.startswith(("/", "-", "$", "~")) and ".." not in clean.split("/"):
            yield os.path.normpath(clean)


def _is_below(root: str, path: str) -> bool:
    real = os.path.realpath(root)
    return os.path.realpath(path).startswith(real + os.sep)


def _sha256(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while True:
        block = stream.read(BLOCK)
        if not block:
            return digest.hexdigest()
        digest.update(block)


def _paths(order: dict[str, str]) -> list[str]:
    return [path for path in order["cache_paths"].split(":") if path]


# --- from the archive to the job's folder -----------------------------------------------------------------------------


def restore(base: str, folder: str, order: dict[str, str]) -> None:
    """Fetch and unpack the archive; the file `restored` of the run then says `ok`, or why not."""
    import signal

    signal.alarm(RESTORE_SECONDS)
    parcel, staging = os.path.join(base, PARCEL), os.path.join(base, STAGING)
    try:
        drop_rest(base)
        started = time.monotonic()
        name = archive_name(order["archive_key"], order["archive_sha256"])
        fetch(order["cache"], name, parcel, int(order["archive_bytes"]), order["archive_sha256"])
        fetched = time.monotonic()
        unpack(parcel, staging, _paths(order))
        said = f"ok fetched {fetched - started:.1f} s, unpacked {time.monotonic() - fetched:.1f} s"
    except Exception as error:
        # Any error means a set-up: an unknown one of a library must not cost more.
        shutil.rmtree(staging, ignore_errors=True)
        said = f"not restored: {error or type(error).__name__}"
    files.remove(parcel)
    files.write_whole(os.path.join(folder, "restored"), said)


def drop_rest(base: str) -> None:
    """Remove what a killed restore or save left."""
    shutil.rmtree(os.path.join(base, STAGING), ignore_errors=True)
    files.remove(os.path.join(base, PARCEL))


def fetch(cache: str, name: str, target: str, size: int, sha256: str) -> None:
    """Copy an archive to *target*, at most *size* bytes. Raises: Refused, OSError: it is missing or another one."""
    digest, left = hashlib.sha256(), size
    with open(target, "wb") as out, _reading(cache, name) as source:
        while left >= 0:
            block = source.read(min(BLOCK, left + 1))
            if not block:
                break
            left -= len(block)
            digest.update(block)
            out.write(block)
    if left != 0 or digest.hexdigest() != sha256:
        raise Refused("the archive is not the one that was stored: its SHA-256 differs")


def unpack(parcel: str, staging: str, paths: list[str]) -> None:
    """
    Unpack into a new folder. Raises: Refused: a name outside *paths*, a file below a link, or anything but files,
    folders and links. tarfile.TarError, OSError, zlib.error, EOFError: it is broken.
    """
    import tarfile

    os.mkdir(staging, 0o700)
    seen: set[str] = set()
    folders = {""}
    modes: list[tuple[str, int]] = []
    with tarfile.open(parcel, "r|gz") as archive:
        for member in archive:
            name = _checked_name(member.name, paths, seen)
            for parent in _parents(name):
                if parent not in folders:
                    if parent in seen:
                        raise Refused(f"{_shown(name)} lies below what is no folder")
                    os.mkdir(os.path.join(staging, parent), 0o700)
                    folders.add(parent)
            target = os.path.join(staging, name)
            if member.isdir():
                if name not in folders:
                    os.mkdir(target, 0o700)
                    folders.add(name)
                modes.append((target, member.mode & 0o777 | 0o700))
                continue
            if name in folders:
                raise Refused(f"{_shown(name)} is twice in the archive")
            seen.add(name)
            _unpack_one(archive, member, staging, target, seen)
    for target, mode in reversed(modes):
        os.chmod(target, mode)


def _checked_name(name: str, paths: list[str], seen: set[str]) -> str:
    if name in seen:
        raise Refused(f"{_shown(name)} is twice in the archive")
    if not name or name != os.path.normpath(name) or os.path.isabs(name) or name.split("/")[0] == "..":
        raise Refused(f"{_shown(name)} leaves the folder")
    if not any(name == path or name.startswith(path + "/") for path in paths):
        raise Refused(f"{_shown(name)} was not declared")
    return name


def _parents(name: str) -> Iterator[str]:
    parts = name.split("/")[:-1]
    for count in range(1, len(parts) + 1):
        yield "/".join(parts[:count])


def _unpack_one(archive: tarfile.TarFile, member: tarfile.TarInfo, staging: str, target: str, seen: set[str]) -> None:
    """A link may lead anywhere (a venv's Python is one of /usr/bin), for nothing is ever written below it."""
    if member.issym():
        # Of the image, or of the job's own folder, which is not complete yet.
        home = os.path.dirname(os.path.dirname(staging))
        away = os.path.isabs(member.linkname) and not member.linkname.startswith(home + os.sep)
        if away and not os.path.exists(member.linkname):
            raise Refused(f"{_shown(member.name)} leads to {_shown(member.linkname)}, which is not on this node")
        os.symlink(member.linkname, target)
    elif member.islnk():
        source = os.path.join(staging, member.linkname)
        if member.linkname not in seen or os.path.islink(source):
            raise Refused(f"{_shown(member.name)} is a link to what is not in the archive")
        os.link(source, target)
    elif member.isfile():
        content = archive.extractfile(member)
        assert content is not None
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "wb") as out:
            shutil.copyfileobj(content, out, BLOCK)
            os.fchmod(handle, member.mode & 0o777)
        os.utime(target, (member.mtime, member.mtime))
    else:
        raise Refused(f"{_shown(member.name)} is neither a file nor a folder nor a link")


def adopt(base: str, folder: str, order: dict[str, str], key: str) -> str:
    """
    Move a restored environment into the job's folder. Empty: done; else why the set-up has to run.

    key: `key_of` this run, after the fetch of its code and before its set-up
    """
    said = files.read_text(os.path.join(folder, "restored"), 1000)
    staging, work = os.path.join(base, STAGING), os.path.join(base, "work")
    try:
        if not said.startswith("ok "):
            return said or "not restored: the restore ended without a word"
        if key != order["archive_key"]:
            return "the archive is of another set-up (lock files, image or Python changed)"
        moves = [(os.path.join(staging, path), os.path.join(work, path)) for path in _paths(order)]
        moves = [(source, target) for source, target in moves if os.path.lexists(source)]
        for _, target in moves:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.lexists(target) or not _is_below(work, os.path.join(os.path.dirname(target), "x")):
                return f"{_shown(os.path.relpath(target, work))} is there already"
        for source, target in moves:
            os.rename(source, target)
    except OSError as error:
        return f"not restored: {error}"
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return ""


# --- from the job's folder to the archive -----------------------------------------------------------------------------


def save(base: str, folder: str, order: dict[str, str]) -> None:
    """Pack and store the environment; the file `archive` of the run then names it, or says why it is not kept."""
    parcel = os.path.join(base, PARCEL)
    started = time.monotonic()
    found: dict[str, str | int | float | bool | None]
    try:
        environment = files.read_environment(folder)
        secrets = {name: environment.get(name, "") for name in order["secrets"].split(",") if name}
        key = order["key"]
        size = pack(os.path.join(base, "work"), _paths(order), parcel, secrets)
        with open(parcel, "rb") as stream:
            sha256 = _sha256(stream)
        store(order["cache"], archive_name(key, sha256), parcel)
        found = {"scope": order["cache_scope"], "key": key, "sha256": sha256, "bytes": size}
        found["seconds"] = round(time.monotonic() - started, 1)
    except Exception as error:
        found = {"refused": str(error)[:400] or type(error).__name__}
    files.remove(parcel)
    files.write_whole(os.path.join(folder, files.ARCHIVE), files.to_json(found))


def pack(work: str, paths: list[str], parcel: str, secrets: dict[str, str]) -> int:
    """
    Pack *paths* below *work*; returns the size in bytes.

    Raises: Refused: there is nothing, a path leads out of the folder, it is too large, or a file holds a secret.
    """
    import gzip
    import tarfile

    patterns = _patterns(secrets)
    present = [path for path in paths if os.path.lexists(os.path.join(work, path))]
    if not present:
        raise Refused(f"the set-up made none of {', '.join(paths)}")
    with gzip.open(parcel, "wb", compresslevel=1) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for path in present:
            if os.path.islink(os.path.join(work, path)) or not _is_below(work, os.path.join(work, path)):
                raise Refused(f"{_shown(path)} is a link, or leaves the job's folder")
            for name in _walk(work, path):
                if os.path.islink(os.path.join(work, name)) and not _leads_somewhere(work, name, present):
                    continue
                _add(archive, work, name, patterns)
                if os.path.getsize(parcel) > LIMIT_BYTES:
                    raise Refused(f"it is larger than {LIMIT_BYTES >> 30} GiB")
    return os.path.getsize(parcel)


def _walk(work: str, path: str) -> Iterator[str]:
    """*path* and all below it, links not followed."""
    yield path
    for folder, names, others in os.walk(os.path.join(work, path)):
        for name in sorted(names + others):
            yield os.path.relpath(os.path.join(folder, name), work)


def _leads_somewhere(work: str, name: str, paths: list[str]) -> bool:
    """
    Whether the link *name* leads to what is there. Raises: Refused: only on this node, outside of *paths*.

    The Python of a venv is a link to one of the image, or to one that uv keeps in the home.
    """
    real, root = os.path.realpath(os.path.join(work, name)), os.path.realpath(work)
    if not os.path.exists(real):
        return False
    home = os.path.dirname(os.path.dirname(root))
    is_kept = any(real == os.path.join(root, path) or real.startswith(os.path.join(root, path, "")) for path in paths)
    if real.startswith(home + os.sep) and not is_kept:
        advice = "let the set-up put it below `cache_paths`, for uv by UV_PYTHON_INSTALL_DIR"
        raise Refused(f"{_shown(name)} leads to {_shown(real)}, which the next node lacks: {advice}")
    return True


def _add(archive: tarfile.TarFile, work: str, name: str, patterns: dict[bytes, str]) -> None:
    full = os.path.join(work, name)
    try:
        info = archive.gettarinfo(full, arcname=name)
    except FileNotFoundError:
        return  # The run removed it meanwhile.
    if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
        return  # Sockets, pipes and devices are nothing that a set-up makes for later.
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    # Fractions of a second would cost a header of their own per file, and a tenth of the time to unpack.
    info.mtime = int(info.mtime)
    _search((name + "\0" + info.linkname).encode(errors="surrogateescape"), name, patterns)
    if not info.isreg():
        archive.addfile(info)
        return
    with open(full, "rb") as stream:
        archive.addfile(info, _Searched(stream, name, patterns))


class _Searched:
    """A file whose content is searched for secrets while it is read."""

    def __init__(self, stream: BinaryIO, name: str, patterns: dict[bytes, str]) -> None:
        self._stream, self._name, self._patterns = stream, name, patterns
        self._overlap = max(map(len, patterns), default=1) - 1
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        window = self._rest + block
        _search(window, self._name, self._patterns)
        self._rest = window[len(window) - self._overlap :] if self._overlap else b""
        return block


def _search(content: bytes, name: str, patterns: dict[bytes, str]) -> None:
    for pattern, secret in patterns.items():
        if pattern in content:
            raise Refused(f"{_shown(name)} holds the value of the secret {secret}")


def _patterns(secrets: dict[str, str]) -> dict[bytes, str]:
    """What to search for: each secret as it is, as part of a URL, in base64, and its long lines."""
    import base64
    from urllib.parse import quote

    found: dict[bytes, str] = {}
    for name, value in secrets.items():
        plain = os.fsencode(value.strip())
        lines = [line.strip() for line in plain.splitlines() if len(line.strip()) >= LINE_BYTES]
        forms = [plain, *lines, quote(plain, safe="").encode(), base64.b64encode(plain)]
        # In the middle of a longer text base64 shifts: each of the three ways, without the characters at its ends.
        for shift in (0, 1, 2) if len(plain) >= SHORTEST_IN_BASE64 else ():
            form = base64.b64encode(b"\0" * shift + plain)[4 if shift else 0 : -4]
            forms += [form, form.translate(bytes.maketrans(b"+/", b"-_"))]
        found.update({form: name for form in forms if form})
    return found


def archive_name(key: str, sha256: str) -> str:
    """Of environment and content, so that no archive is ever written over another one."""
    return f"{key[:24]}-{sha256[:24]}.tar.gz"


# --- where archives lie -----------------------------------------------------------------------------------------------


def _reading(cache: str, name: str) -> BinaryIO:
    """Raises: OSError: it is not there, or the service refuses us."""
    if not cache.startswith("gs://"):
        return open(os.path.join(cache, name), "rb")
    import checkpoints

    bucket, path = checkpoints.in_bucket(cache, name)
    return checkpoints.StorageApi().open(bucket, path)


def store(cache: str, name: str, parcel: str) -> None:
    """Store *parcel* under a name that no other content has. Raises: OSError."""
    if cache.startswith("gs://"):
        import checkpoints

        bucket, path = checkpoints.in_bucket(cache, name)
        checkpoints.StorageApi().upload(bucket, path, parcel)
        return
    os.makedirs(cache, exist_ok=True)
    target = os.path.join(cache, name)
    incoming = f"{target}.{os.uname().nodename}.{os.getpid()}"
    try:
        shutil.copyfile(parcel, incoming)
        os.replace(incoming, target)
    finally:
        files.remove(incoming)


def _shown(name: str) -> str:
    return ascii(name[:200])[1:-1]


if __name__ == "__main__":
    main(sys.argv[1:])
