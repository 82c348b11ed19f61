"""Keys and pins of which the file system holds something else: one line, and nobody is trusted for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpucare.adapters.ssh.keys import PinStore, load_or_make_key
from tpucare.model.errors import ConfigError
from tpucare.model.resources import NodeKey, Worker

WORKER = Worker(NodeKey("grant", "us-central2-b", "pod-0-a1"), 1, 0, "127.0.0.2")


@pytest.mark.parametrize("harm", ["its folder is a file", "a folder", "a dangling link"])
def test_a_key_that_cannot_be_there_is_one_line(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "ssh" / "id_ed25519"
    match harm:
        case "its folder is a file":
            path.parent.touch()
        case "a folder":
            path.mkdir(mode=0o700, parents=True)
        case "a dangling link":
            path.parent.mkdir()
            path.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"^{path}: "):
        load_or_make_key(path)


def test_a_folder_of_pins_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pins").touch()
    with pytest.raises(ConfigError, match="folder of host keys"):
        PinStore(tmp_path / "pins")


def test_a_pin_that_cannot_be_read_lets_no_key_in(tmp_path: Path) -> None:
    store = PinStore(tmp_path)
    assert store.check(WORKER, "ssh-ed25519 mine")
    store.known_hosts(WORKER)[0].write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        PinStore(tmp_path).check(WORKER, "ssh-ed25519 other")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        PinStore(tmp_path).pinned(WORKER)


def test_a_file_with_a_number_that_is_none_is_no_pin(tmp_path: Path) -> None:
    (tmp_path / "a@b@c@\u00b2").write_text("c.2.\u00b2 ssh-ed25519 AAAA\n")
    (tmp_path / "a@b@c@7").write_text("c.7.\u00b2 ssh-ed25519 AAAA\n")
    assert PinStore(tmp_path).pinned(Worker(NodeKey("a", "b", "c"), 7, 0, "127.0.0.1")) == frozenset()
