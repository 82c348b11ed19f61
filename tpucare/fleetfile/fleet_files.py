"""
`job.files`: which paths a fleet may name on workers and on this machine, and the reading of the latter within bounds.

On a worker a path stays below the job's folder; on this machine below the folder of the fleet file (`local_files`).
Reading goes through a function that the door hands in; `read_local` is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from tpucare.fleetfile.problems import PROBLEMS_LIMIT
from tpucare.model.local_files import EVERYWHERE_PRIVATE, Private, open_below
from tpucare.model.text import shown

ReadFile = Callable[[Path, str], bytes]
"""Content of the file at a relative path below a folder. Raises: OSError, ValueError."""

FILES_LIMIT = 100
FILE_LIMIT_BYTES = 1 << 20
TOTAL_LIMIT_BYTES = 16 << 20
# A file per slot is asked for at every parse, on the thread of the loop: 10,000 take half a second.
READS_LIMIT = 10_000


def read_local(folder: Path, path: str, private: Private = EVERYWHERE_PRIVATE) -> bytes:
    """
    Content of a regular file; of a larger one, one byte more than FILE_LIMIT_BYTES.

    Raises:
        OSError: As `local_files.open_below`.
    """
    with open_below(folder, path, private) as file:
        return file.read(FILE_LIMIT_BYTES + 1)


def path_problems(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(worker path, what is wrong with it or its local path) of every entry that may not stand."""
    if len(files) > FILES_LIMIT:
        yield "", f"must not have more than {FILES_LIMIT} entries; send a folder with `workdir`"
        return
    taken: dict[PurePosixPath, str] = {}
    for remote, local in files.items():
        text = _remote_problem(remote) or _local_problem(local) or _clash(PurePosixPath(remote), taken)
        if text:
            yield remote, text
        taken[PurePosixPath(remote)] = remote


def read_all(paths: Collection[str], folder: Path, read_file: ReadFile) -> tuple[dict[str, bytes], dict[str, str]]:
    """
    Contents of the local *paths* that could be read, and what is wrong with the others; both by path as written.

    Ends where more could not be read than a person is told of.
    """
    contents: dict[str, bytes] = {}
    wrong: dict[str, str] = {}
    total = 0
    for path in dict.fromkeys(paths):
        if len(wrong) > PROBLEMS_LIMIT:
            break
        try:
            content = read_file(folder, path)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            wrong[path] = f"{shown(path)} cannot be read: {shown(reason)}"
            continue
        total += len(content)
        if len(content) > FILE_LIMIT_BYTES:
            wrong[path] = f"{shown(path)} is larger than {FILE_LIMIT_BYTES >> 20} MB; keep it in a bucket"
        elif total > TOTAL_LIMIT_BYTES:
            wrong[path] = f"all files together are larger than {TOTAL_LIMIT_BYTES >> 20} MB; keep them in a bucket"
            break
        else:
            contents[path] = content
    return contents, wrong


def _remote_problem(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or len(path) > 255 or not path.isprintable() or path != path.strip():
        return "the path on the worker must be 1 to 255 printable characters"
    if path.startswith(("/", "~")) or ".." in parts or path.endswith("/"):
        return "the path on the worker must stay below the job's folder: relative and without .."
    if parts[0] in (".git", ".tpucare"):
        return f"{parts[0]} on the worker is not for files of a fleet"
    return ""


def _local_problem(path: str) -> str:
    if path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts:
        return f"{shown(path)} must lie in the folder of the fleet file or below: relative and without .."
    return ""


def _clash(path: PurePosixPath, taken: Mapping[PurePosixPath, str]) -> str:
    for other, written in taken.items():
        if path == other or path in other.parents or other in path.parents:
            return f"clashes with {shown(written)} on the worker"
    return ""
