"""
Environments kept over nodes: what is packed, what is refused, and that nothing but the very archive is ever unpacked.

The tools by themselves, as a worker's Python runs them; `tests/adapters/test_environments.py` has whole runs.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "worker"
sys.path.insert(0, str(TEMPLATES))
try:
    import environment
finally:
    sys.path.remove(str(TEMPLATES))

PATHS = ["venv", "built/lib.so"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A job's folder after its set-up."""
    folder = tmp_path / "work"
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/lib/empty").mkdir(parents=True)
    (folder / "venv/bin/python").symlink_to("/usr/bin/python3")
    (folder / "venv/bin/tool").write_text("#!/bin/sh\necho hello\n")
    (folder / "venv/bin/tool").chmod(0o755)
    (folder / "venv/lib/größe").write_bytes(bytes(range(256)) * 9000)
    os.link(folder / "venv/lib/größe", folder / "venv/lib/same")
    (folder / "built").mkdir()
    (folder / "built/lib.so").write_bytes(b"\x7fELF")
    (folder / "built/lib.o").write_bytes(b"not declared")
    (folder / "data").write_bytes(b"not declared")
    return folder


def packed(work: Path, secrets: dict[str, str] | None = None, paths: list[str] = PATHS) -> Path:
    parcel = work.parent / "parcel.tar.gz"
    size = environment.pack(str(work), paths, str(parcel), secrets or {})
    assert size == parcel.stat().st_size
    return parcel


def listing(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name, mode = str(path.relative_to(folder)), path.lstat().st_mode & 0o777
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = (mode, hashlib.sha256(path.read_bytes()).hexdigest()) if path.is_file() else mode
    return found


def test_what_is_declared_comes_back_as_it_was_and_nothing_else(work: Path, tmp_path: Path) -> None:
    parcel, there = packed(work), tmp_path / "there"
    environment.unpack(str(parcel), str(there), PATHS)
    want = {name: value for name, value in listing(work).items() if name not in ("built/lib.o", "data")}
    got = listing(there)
    assert got.pop("built") == 0o700  # Of the parent of a declared file only the path is kept.
    want.pop("built")
    assert got == want
    assert (there / "venv/lib/same").stat().st_nlink == 2


def test_sockets_and_pipes_stay_behind(work: Path, tmp_path: Path) -> None:
    os.mkfifo(work / "venv/pipe")
    environment.unpack(str(packed(work)), str(tmp_path / "there"), PATHS)
    assert not (tmp_path / "there/venv/pipe").exists()


@pytest.mark.parametrize("path", ["venv", "built/lib.so"])
def test_a_declared_path_that_leads_out_of_the_folder_is_refused(work: Path, tmp_path: Path, path: str) -> None:
    outside = tmp_path / "home"
    (outside / "venv").mkdir(parents=True)
    (outside / "lib.so").write_text("private")
    part = work / path.partition("/")[0]
    part.rename(tmp_path / "away")
    part.symlink_to(outside)
    with pytest.raises(environment.Refused, match="is a link, or leaves the job's folder"):
        packed(work, paths=[path])


def test_a_python_that_only_this_node_has_is_told(work: Path, tmp_path: Path) -> None:
    """uv keeps its own Pythons in the home; a venv of one is of no use on the next node."""
    python = tmp_path.parent / ".local/share/uv/python/bin/python3"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch()
    (work / "venv/bin/python").unlink()
    (work / "venv/bin/python").symlink_to(python)
    with pytest.raises(environment.Refused, match="which the next node lacks: let the set-up put it below"):
        packed(work)
    python.unlink()
    with tarfile.open(packed(work)) as archive:
        assert "venv/bin/python" not in archive.getnames()


def test_links_between_what_is_kept_are_kept(work: Path, tmp_path: Path) -> None:
    (work / "venv/lib/absolute").symlink_to(work / "built/lib.so")
    (work / "venv/lib/relative").symlink_to("../../built/lib.so")
    environment.unpack(str(packed(work)), str(tmp_path / "there"), PATHS)
    assert os.readlink(tmp_path / "there/venv/lib/absolute") == str(work / "built/lib.so")
    assert os.readlink(tmp_path / "there/venv/lib/relative") == "../../built/lib.so"


def test_a_link_inside_is_kept_as_a_link_and_its_target_is_not_read(work: Path, tmp_path: Path) -> None:
    private = Path("/tmp") / f"{tmp_path.name}-id_ed25519"
    private.write_text("PRIVATE KEY")
    (work / "venv/key").symlink_to(private)
    with tarfile.open(packed(work)) as archive:
        assert archive.getmember("venv/key").issym()
        assert not any(b"PRIVATE" in (f.read() if (f := archive.extractfile(m)) else b"") for m in archive if m.isreg())
    private.unlink()


def test_a_set_up_that_made_nothing_of_it_is_told(work: Path) -> None:
    with pytest.raises(environment.Refused, match=r"the set-up made none of \.venv"):
        packed(work, paths=[".venv"])


# --- secrets ---------------------------------------------------------------------------------------------------------

TOKEN = "hf_s3cret/with+signs=and more"
KEY = "-----BEGIN KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ\n" * 3 + "-----END KEY-----\n"


@pytest.mark.parametrize(
    "content",
    [
        f"index = https://u:{quote(TOKEN, safe='')}@example.com".encode(),
        b"x" * (environment.BLOCK - 7) + TOKEN.encode() + b"y" * 50_000,
        b"x" * (16 * 1024 - 7) + TOKEN.encode(),
        base64.b64encode(TOKEN.encode()),
        base64.b64encode(b"user:" + TOKEN.encode() + b"!"),
        base64.b64encode(b"user::" + TOKEN.encode() + b"!"),
        KEY.replace("\n", "\r\n").encode(),
    ],
    ids=["in a URL", "over a block", "over tar's block", "base64", "base64 +1", "base64 +2", "other line ends"],
)
def test_a_file_with_a_secret_keeps_all_from_being_kept(work: Path, content: bytes) -> None:
    (work / "venv/lib/config").write_bytes(content)
    with pytest.raises(environment.Refused) as refused:
        packed(work, {"HF_TOKEN": TOKEN, "GIT_SSH_KEY": KEY, "EMPTY": ""})
    said = str(refused.value)
    assert "venv/lib/config holds the value of the secret" in said
    assert TOKEN not in said


@pytest.mark.parametrize("kind", ["name", "link"])
def test_names_and_links_are_searched_too(work: Path, tmp_path: Path, kind: str) -> None:
    if kind == "name":
        (work / "venv" / "s3cr3t-value").mkdir()
    else:
        target = tmp_path.parents[1] / "s3cr3t-value"
        target.touch()
        (work / "venv/link").symlink_to(target)
    with pytest.raises(environment.Refused, match="holds the value of the secret TOKEN"):
        packed(work, {"TOKEN": "s3cr3t-value"})


@settings(max_examples=40, deadline=None)
@given(before=st.integers(0, 40_000), secret=st.text("abcdef0123456789", min_size=8, max_size=300))
def test_no_place_of_a_file_hides_a_secret(before: int, secret: str) -> None:
    stream = io.BytesIO(b"-" * before + secret.encode() + b"-" * 20_000)
    searched = environment._Searched(stream, "f", environment._patterns({"S": secret}))
    with pytest.raises(environment.Refused):
        list(iter(lambda: searched.read(16 * 1024), b""))


# --- hostile and broken archives -------------------------------------------------------------------------------------

Member = tuple[str, bytes, str]


def made(path: Path, *members: Member) -> Path:
    """An archive of (name, type, link target or content)."""
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, rest in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o4777
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = rest
                archive.addfile(info)
            else:
                info.size = len(rest) if kind == tarfile.REGTYPE else 0
                archive.addfile(info, io.BytesIO(rest.encode()))
    return path


FILE, DIR, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE: list[tuple[str, list[Member], str]] = [
    ("parent", [("venv/../../escaped", FILE, "x")], "leaves the folder"),
    ("dots first", [("../escaped", FILE, "x")], "leaves the folder"),
    ("absolute", [("/tmp/escaped", FILE, "x")], "leaves the folder"),
    ("undeclared", [("escaped", FILE, "x")], "was not declared"),
    ("like a declared one", [("venvy/escaped", FILE, "x")], "was not declared"),
    ("ssh", [(".ssh/authorized_keys", FILE, "x")], "was not declared"),
    ("below a link", [("venv", LINK, ".."), ("venv/escaped", FILE, "x")], "lies below what is no folder"),
    ("deep below a link", [("venv/a", LINK, "/tmp"), ("venv/a/b/escaped", FILE, "x")], "lies below what is no folder"),
    ("below a file", [("venv", FILE, "x"), ("venv/escaped", FILE, "x")], "lies below what is no folder"),
    ("over a link", [("venv/a", LINK, "/tmp/"), ("venv/a", FILE, "x")], "is twice"),
    ("to nothing", [("venv/a", LINK, "/opt/no/python3")], "leads to /opt/no/python3, which is not on this node"),
    ("a folder over a link", [("venv/a", LINK, "/tmp"), ("venv/a", DIR, "")], "is twice"),
    ("a link over a folder", [("venv/a", DIR, ""), ("venv/a", LINK, "/tmp")], "is twice"),
    ("hard link out", [("venv/a", HARD, "/etc/passwd")], "is a link to what is not in the archive"),
    ("hard link up", [("venv/a", HARD, "../../secret")], "is a link to what is not in the archive"),
    ("hard link to a link", [("venv/a", LINK, "/etc/passwd"), ("venv/b", HARD, "venv/a")], "is not in the archive"),
    ("device", [("venv/a", tarfile.CHRTYPE, "")], "is neither a file nor a folder nor a link"),
    ("pipe", [("venv/a", tarfile.FIFOTYPE, "")], "is neither a file nor a folder nor a link"),
    ("not normal", [("venv//a", FILE, "x")], "leaves the folder"),
]


@pytest.mark.parametrize(("members", "said"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_an_archive_that_reaches_out_is_refused(tmp_path: Path, members: list[Member], said: str) -> None:
    (tmp_path / "secret").write_text("untouched")
    parcel, staging = made(tmp_path / "a.tar.gz", *members), tmp_path / "base" / "staging"
    staging.parent.mkdir()
    with pytest.raises(environment.Refused, match=said):
        environment.unpack(str(parcel), str(staging), PATHS)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "staging" not in path.parts}
    assert left == {"a.tar.gz", "base", "secret"}
    assert not Path("/tmp/escaped").exists()


def test_no_bit_makes_a_file_run_as_another_user(tmp_path: Path) -> None:
    environment.unpack(str(made(tmp_path / "a.tar.gz", ("venv/a", FILE, "x"))), str(tmp_path / "there"), PATHS)
    assert (tmp_path / "there/venv/a").stat().st_mode & 0o7777 == 0o777


# --- from a place, into the job's folder -----------------------------------------------------------------------------


class Base:
    """The folder of tpucare on a worker, a run in it, and a shared folder with archives."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.cache = folder / "cache"
        self.base, self.run = folder / "base", folder / "base" / "pod-a1.1"
        self.run.mkdir(parents=True)
        work.rename(self.base / "work")
        self.work = self.base / "work"
        (self.run / "env").write_bytes(b"TOKEN=t0p-s3cret\0A=b\0")
        (self.run / "setup.sh").write_text("cd work\nexec bash -ec 'bash setup.sh -r reqs/tpu.txt && make x=lock.json'")
        self.order = {"cache": str(self.cache / "pod"), "cache_scope": "5c" * 32, "cache_paths": ":".join(PATHS)}
        self.order |= {"secrets": "TOKEN", "archive_key": "", "archive_sha256": "", "archive_bytes": "0"}

    def key(self) -> str:
        return str(environment.key_of(str(self.base), str(self.run), self.order))

    def save(self) -> dict[str, object]:
        environment.save(str(self.base), str(self.run), {**self.order, "key": self.key()})
        assert not (self.base / environment.PARCEL).exists()
        found: dict[str, object] = json.loads((self.run / "archive").read_text())
        return found

    def next_node(self, found: dict[str, object]) -> None:
        """Another worker with the same code, that is told of the archive."""
        for path in PATHS:
            part = self.work / path
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        self.order |= {"archive_key": str(found["key"]), "archive_sha256": str(found["sha256"])}
        self.order["archive_bytes"] = str(found["bytes"])

    def restore(self) -> str:
        environment.restore(str(self.base), str(self.run), self.order)
        return str(environment.adopt(str(self.base), str(self.run), self.order, self.key()))

    @property
    def stored(self) -> list[Path]:
        return list((self.cache / "pod").iterdir())


@pytest.fixture
def base(tmp_path: Path, work: Path) -> Base:
    return Base(tmp_path, work)


def test_the_next_node_has_it_without_a_set_up(base: Base) -> None:
    before = listing(base.work)
    found = base.save()
    assert [path.name for path in base.stored] == [environment.archive_name(str(found["key"]), str(found["sha256"]))]
    base.next_node(found)
    assert base.restore() == ""
    assert listing(base.work) == before
    assert sorted(path.name for path in base.base.iterdir()) == ["pod-a1.1", "work"]


def test_what_holds_a_secret_is_not_stored(base: Base) -> None:
    (base.work / "venv/pip.conf").write_text("token=t0p-s3cret")
    assert base.save() == {"refused": "venv/pip.conf holds the value of the secret TOKEN"}
    assert not base.cache.exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def turn_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def exchange(path: Path) -> None:
    """What somebody who may write to the bucket puts there: a valid archive with a program of theirs."""
    made(path, ("venv/bin/tool", FILE, "#!/bin/sh\nsteal"))


@pytest.mark.parametrize("harm", [truncate, turn_a_bit, lengthen, exchange, Path.unlink, lambda p: p.write_bytes(b"")])
def test_any_other_content_is_a_miss_and_leaves_nothing(base: Base, harm: Callable[[Path], object]) -> None:
    found = base.save()
    base.next_node(found)
    before = listing(base.work)
    harm(base.stored[0])
    assert base.restore().startswith("not restored: ")
    assert listing(base.work) == before
    assert sorted(path.name for path in base.base.iterdir()) == ["pod-a1.1", "work"]


def test_a_broken_archive_that_was_stored_so_is_a_miss(base: Base) -> None:
    base.cache.mkdir()
    content = b"\x1f\x8b not gzip"
    sha256 = hashlib.sha256(content).hexdigest()
    (base.cache / "pod").mkdir()
    (base.cache / "pod" / environment.archive_name(base.key(), sha256)).write_bytes(content)
    base.next_node({"key": base.key(), "sha256": sha256, "bytes": len(content)})
    assert base.restore().startswith("not restored: ")


@pytest.mark.parametrize("name", ["setup.sh", "reqs/tpu.txt", "requirements.txt", "uv.lock", "lock.json"])
def test_a_changed_lock_file_is_another_environment(base: Base, name: str) -> None:
    found = base.save()
    base.next_node(found)
    (base.work / name).parent.mkdir(exist_ok=True)
    (base.work / name).write_text("jax==0.10.2")
    assert base.restore() == "the archive is of another set-up (lock files, image or Python changed)"
    assert not (base.work / "venv").exists()


def test_other_files_of_the_job_may_change(base: Base) -> None:
    found = base.save()
    base.next_node(found)
    (base.work / "train.py").write_text("print(2)")
    assert base.restore() == ""


@pytest.mark.parametrize("changed", ["cache_scope", "cache_paths"])
def test_another_scope_is_another_environment(base: Base, changed: str) -> None:
    """The scope has project, fleet and image, so another fleet's archive is never used."""
    found = base.save()
    base.next_node(found)
    base.order[changed] = "venv" if changed == "cache_paths" else "ab" * 32
    assert base.restore() != ""
    assert not (base.work / "venv").exists()


def test_a_folder_that_the_code_brings_is_left_alone(base: Base) -> None:
    found = base.save()
    base.next_node(found)
    (base.work / "venv").mkdir()
    (base.work / "venv/mine").touch()
    assert base.restore() == "venv is there already"
    assert [path.name for path in (base.work / "venv").iterdir()] == ["mine"]
    assert not (base.work / "built/lib.so").exists()


def test_a_link_in_the_code_leads_no_environment_out_of_the_folder(base: Base, tmp_path: Path) -> None:
    found = base.save()
    base.next_node(found)
    (tmp_path / "home").mkdir()
    (base.work / "built/lib.o").unlink()
    (base.work / "built").rmdir()
    (base.work / "built").symlink_to(tmp_path / "home")
    assert base.restore() == "built/lib.so is there already"
    assert list((tmp_path / "home").iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(base: Base) -> None:
    base.cache.write_text("a file")
    assert "Not a directory" in str(base.save()["refused"])


@pytest.fixture(autouse=True)
def usual_mask() -> Iterator[None]:
    mask = os.umask(0o022)
    yield
    os.umask(mask)
