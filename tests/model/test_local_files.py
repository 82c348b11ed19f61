"""What a fleet file carries to workers lies below its folder, whatever links say, and opens no other door."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kits.service import VirtualService, fleet_text
from tpucare.adapters.runner import bundle
from tpucare.adapters.state import folder as state_folder
from tpucare.fleetfile.parse import read_local
from tpucare.model.errors import ConfigError, StoreError
from tpucare.model.local_files import Private, open_below, open_regular
from tpucare.service.fleet_folder import read_text
from tpucare.service.options import Options

SECRET = b"s3cr3t"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/key").write_bytes(SECRET)
    made = tmp_path / "fleets"
    (made / "sub").mkdir(parents=True)
    (made / "sub/conf").write_text("mine")
    return made


@pytest.mark.parametrize(
    ("link", "target", "path"),
    [
        ("conf", "sub/conf", "conf"),
        ("below", "sub", "below/conf"),
        ("sub/here", "../sub/conf", "sub/here"),
    ],
)
def test_a_link_that_stays_below_the_folder_counts(folder: Path, link: str, target: str, path: str) -> None:
    """A ConfigMap of Kubernetes is made of such links."""
    (folder / link).symlink_to(target)
    assert read_local(folder, path) == b"mine"


@pytest.mark.parametrize(
    ("link", "target", "path"),
    [
        ("conf", "../outside/key", "conf"),
        ("conf", "/etc/passwd", "conf"),
        ("out", "../outside", "out/key"),
        ("twice", "sub/../../outside/key", "twice"),
        ("loop", "loop", "loop"),
    ],
)
def test_a_link_that_leads_out_of_the_folder_is_refused(folder: Path, link: str, target: str, path: str) -> None:
    (folder / link).symlink_to(target)
    with pytest.raises(OSError, match=r"leads out|symbolic links"):
        open_below(folder, path)


def test_a_folder_that_becomes_a_link_a_moment_later_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = os.path.realpath

    def then_swapped(path: str) -> str:
        found = resolved(path)
        if found.endswith("conf"):
            (folder / "sub").rename(folder / "before")
            (folder / "sub").symlink_to("../outside")
        return found

    (folder.parent / "outside/conf").write_bytes(SECRET)
    monkeypatch.setattr(os.path, "realpath", then_swapped)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        open_below(folder, "sub/conf")


def test_a_pipe_that_took_the_place_of_a_file_is_not_waited_for(folder: Path) -> None:
    """The loop stood still in its `open`; a look at its kind before that says nothing of what is there now."""
    os.mkfifo(folder / "pod.yaml")
    with pytest.raises(OSError, match="no regular file"):
        open_regular(folder / "pod.yaml")
    with pytest.raises(OSError, match="no regular file"):
        open_below(folder, "pod.yaml")
    with pytest.raises(ConfigError, match="no regular file"):
        read_text(folder / "pod.yaml")


# --- what is private --------------------------------------------------------------------------------------------------


def private_of(tmp_path: Path) -> tuple[Options, Private]:
    options = Options(tmp_path / "state")
    env = {
        "HOME": str(tmp_path / "home"),
        "CREDENTIALS_DIRECTORY": str(tmp_path / "credentials"),
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "work/account.json"),
    }
    return options, options.private(env)


PRIVATE_FILES = (
    "state/ssh/id_ed25519",
    "state/owner",
    "state/accepted/pod.json",
    "credentials/WANDB_API_KEY",
    "home/.ssh/id_rsa",
    "home/.config/gcloud/application_default_credentials.json",
    "home/.netrc",
    "work/account.json",
)


@pytest.mark.parametrize("path", PRIVATE_FILES)
def test_what_opens_other_doors_is_never_read_for_a_fleet(tmp_path: Path, path: str) -> None:
    """
    A fleet file had the daemon's own key sent to a worker. Files that give access elsewhere are refused by their real
    path, whatever names them.
    """
    _, private = private_of(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_bytes(SECRET)
    (tmp_path / "link").symlink_to(path)
    for named in (path, "link"):
        with pytest.raises(OSError, match="never sent"):
            read_local(tmp_path, named, private)


@pytest.mark.parametrize("path", ["proc/self/environ", "dev/zero", "sys/power/state"])
def test_what_the_kernel_shows_is_never_read_for_a_fleet(path: str) -> None:
    with pytest.raises(OSError, match=r"never sent|no regular file"):
        read_local(Path("/"), path)


def test_files_beside_fleets_in_the_state_folder_are_a_persons(tmp_path: Path) -> None:
    options, private = private_of(tmp_path)
    (options.state / "fleets").mkdir(parents=True)
    (options.state / "fleets/conf").write_text("mine")
    assert read_local(options.state / "fleets", "conf", private) == b"mine"


@pytest.mark.parametrize("path", PRIVATE_FILES)
@pytest.mark.parametrize("how", ["its folder", "above it", "a link to its folder"])
def test_no_workdir_sends_it(tmp_path: Path, path: str, how: str) -> None:
    _, private = private_of(tmp_path)
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_bytes(SECRET)
    (tmp_path / "link").symlink_to(file.parent)
    named = {"its folder": file.parent, "above it": tmp_path, "a link to its folder": tmp_path / "link"}
    with pytest.raises(ConfigError, match="never sent"):
        bundle.pack(str(named[how]), private)


@pytest.mark.parametrize("folder", ["/", "/proc/self", "/dev", "/run/.."])
def test_a_workdir_of_the_whole_machine_is_refused_at_once(folder: str) -> None:
    with pytest.raises(ConfigError, match="never sent"):
        bundle.pack(folder)


def test_a_private_file_that_git_ignores_keeps_no_folder_from_being_sent(tmp_path: Path) -> None:
    _, private = private_of(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q", work], check=True)
    (work / "account.json").write_bytes(SECRET)
    (work / "train.py").touch()
    with pytest.raises(ConfigError, match=r"never sent .*account\.json"):
        bundle.pack(str(work), private)
    (work / ".gitignore").write_text("account.json\n")
    assert SECRET not in bundle.pack(str(work), private).content


# --- the first line of an applied copy --------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> VirtualService:
    return VirtualService(tmp_path)


def applied(folder: Path | str, text: str) -> str:
    return f'# tpucare: applied; relative paths start at "{folder}"\n{text}'


def test_a_first_line_that_tpucare_did_not_write_counts_for_nothing(service: VirtualService, folder: Path) -> None:
    """
    The first line of an applied copy names the folder where its paths start; a person who may write to the fleets
    folder named `/` there and had the daemon's own key sent to a worker. The line counts only where `apply` brought
    that fleet from that folder.
    """
    text = applied("/", fleet_text() + "  files: {key: etc/passwd}\n")
    service.write(text)
    service.look()
    (told,) = service.daemon.told("fleet-refused")
    assert "did not write this line" in told
    assert service.slots == []
    with pytest.raises(ConfigError, match="etc/passwd"):
        service.apply(text, folder)
    assert service.slots == []


def test_a_first_line_that_nothing_depends_on_is_a_comment(service: VirtualService) -> None:
    service.write(applied("/", fleet_text()))
    service.look()
    assert service.slots == ["pod-0"]


def test_a_copy_keeps_its_meaning_when_it_is_edited_and_when_the_store_is_lost(
    service: VirtualService, folder: Path
) -> None:
    home = folder / "sub"
    service.apply(fleet_text() + "  files: {conf: conf}\n", home)
    copy = service.folder / "pod.yaml"
    copy.write_text(copy.read_text().replace("count: 1", "count: 2"))
    service.look()
    assert service.slots == ["pod-0", "pod-1"]
    assert service.registry.was_applied_from("pod", home)
    service.registry.records.clear()
    assert service.registry.was_applied_from("pod", home)
    assert not service.registry.was_applied_from("pod", Path("/"))
    assert not service.registry.was_applied_from("cod", home)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_through_no_link(tmp_path: Path) -> None:
    """A writer of the folder chose which file of the daemon's user was overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("pod.yaml", "pod.yaml.new", ".pod.yaml.new"):
        (tmp_path / name).symlink_to(victim)
    state_folder.write_private(tmp_path / "pod.yaml", "text")
    assert victim.read_text() == "precious"
    assert (tmp_path / "pod.yaml").read_text() == "text"
    assert not (tmp_path / "pod.yaml").is_symlink()


def test_a_file_that_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml" / "in-the-way").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be written"):
        state_folder.write_private(tmp_path / "pod.yaml", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["pod.yaml"]
