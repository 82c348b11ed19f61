"""The store keeps what it acknowledged, tells what it cannot trust, and never starts over by itself."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.kits.stopped import stopped_at_each_line
from tpucare.adapters.state import folder as state_folder
from tpucare.adapters.state import schema
from tpucare.adapters.state.folder import holder, store_path
from tpucare.adapters.state.store import SqliteStore, accept_move, open_reader, open_store
from tpucare.model.causes import Reason
from tpucare.model.errors import StoreCorrupt, StoreError, StoreForeign, StoreFull, StoreLocked
from tpucare.model.lifecycles import CreateState, RunState
from tpucare.model.memory import (
    CreateIntent,
    DeleteIntent,
    DesiredState,
    FailureCounter,
    FailureKind,
    FleetRecord,
    Memory,
    NodeMemory,
    PlaceMemory,
    RunMemory,
)
from tpucare.model.resources import Event

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HERE = "4f6b1c1a8b6d4f7f9d3f0a2b5c6d7e8f"
ELSEWHERE = "00000000000000000000000000000001"

MEMORY = Memory(
    fleet="pod",
    wish=DesiredState.PAUSED,
    next_number=4,
    creates=(
        CreateIntent("pod-0-a3", 3, "us-central1-a", "us-central1-a/v4-8", NOW, tries=2, state=CreateState.ANSWER_LOST),
    ),
    nodes=(
        NodeMemory("pod-0-a2", "us-central1-a", 2**63 + 11, NOW, launched=True, delete=DeleteIntent(NOW, Reason.ASKED)),
    ),
    run=RunMemory("pod-0-a2.1", "pod-0-a2", 1, NOW, state=RunState.RUNNING, complete=True),
    places={"us-central1-a/v4-8": PlaceMemory(failures=3, retry_at=NOW, reason="no more capacity — 容量")},
    books={FailureKind.CRASH.value: FailureCounter(failures=1, total=7, retry_at=NOW)},
    step=120,
)
FLEET = FleetRecord("pod", "name: pod\n", "/etc/tpucare/fleets", NOW, DesiredState.DOWN)

# What version 1 looked like when it was released. Frozen: a later schema must still read it.
VERSION_1 = """
    PRAGMA application_id = 1414550851;
    PRAGMA user_version = 1;
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE slots (name TEXT PRIMARY KEY, fleet TEXT NOT NULL, memory TEXT NOT NULL);
    CREATE TABLE fleets (name TEXT PRIMARY KEY, record TEXT NOT NULL);
    CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, slot TEXT NOT NULL, fleet TEXT NOT NULL,
                         event TEXT NOT NULL);
    CREATE INDEX events_by_slot ON events (slot, number);
    CREATE INDEX events_by_fleet ON events (fleet, number);
    INSERT INTO meta VALUES ('owner', 'o-abcdefghij23'), ('machine', '{machine}'), ('lost', '');
    INSERT INTO slots VALUES ('pod-0', 'pod', '{{"fleet": "pod", "next_number": 2, "attempts": 1,
        "of_a_newer_minor": [1],
        "nodes": [{{"name": "pod-0-a1", "zone": "us-central1-a", "id": 7, "create_time": "2026-11-21T12:00:00Z"}}]}}');
    INSERT INTO fleets VALUES ('pod', '{{"name": "pod", "text": "name: pod", "folder": "/f",
        "accepted_at": "2026-11-21T12:00:00Z"}}');
    INSERT INTO events VALUES (41, 'pod-0', 'pod', '{{"at": "2026-11-21T12:00:00Z", "kind": "create",
        "text": "hello"}}');
"""


def on(folder: Path, instance_id: str, *, machine_id: str = HERE) -> SqliteStore:
    return open_store(folder, machine_id=machine_id, instance_id=instance_id, now=NOW)


def opened(folder: Path, *, machine_id: str = HERE, name: str = "tpucare") -> SqliteStore:
    return open_store(folder, machine_id=machine_id, now=NOW, name=name)


def event(text: str, slot: str = "pod-0") -> Event:
    return Event(NOW, "test", text, slot)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(folder: Path) -> Iterator[SqliteStore]:
    with opened(folder) as store:
        yield store


class TestMemory:
    def test_everything_comes_back_after_a_restart(self, folder: Path) -> None:
        with opened(folder) as store:
            store.save({"pod-0": MEMORY, "pod-1": Memory(fleet="pod")})
            store.save_fleet(FLEET)
        with opened(folder) as store:
            assert store.memories() == {"pod-0": MEMORY, "pod-1": Memory(fleet="pod")}
            assert store.fleets() == {"pod": FLEET}
            assert not store.lost

    def test_a_fleet_under_another_name_than_its_own_is_corrupt(self, folder: Path) -> None:
        with opened(folder) as store:
            store.save_fleet(FLEET)
        with contextlib.closing(sqlite3.connect(folder / "tpucare.sqlite")) as connection, connection:
            connection.execute("UPDATE fleets SET name = 'other'")
        with opened(folder) as store, pytest.raises(StoreCorrupt, match="fleet other is that of pod"):
            store.fleets()

    def test_the_newest_memory_wins_and_that_of_another_slot_stays(self, store: SqliteStore) -> None:
        store.save({"pod-0": MEMORY, "pod-1": MEMORY})
        store.save({"pod-0": replace(MEMORY, step=130)})
        assert store.memories() == {"pod-0": replace(MEMORY, step=130), "pod-1": MEMORY}

    def test_instants_are_written_in_utc(self, folder: Path, store: SqliteStore) -> None:
        store.save({"pod-0": Memory(fleet="pod", ended_at=NOW)})
        text = sqlite3.connect(store_path(folder)).execute("SELECT memory FROM slots").fetchone()[0]
        assert json.loads(text)["ended_at"] == "2026-11-21T12:00:00Z"
        assert store.memories()["pod-0"].ended_at == NOW

    def test_a_text_that_was_no_utf8_is_kept_readable(self, store: SqliteStore) -> None:
        stderr = b"no \xff space".decode("utf-8", "surrogateescape")
        store.save({"pod-0": Memory(fleet="pod", end_why=stderr)}, [event(stderr)])
        assert store.memories()["pod-0"].end_why == r"no \udcff space"
        assert store.events()[0][1].text == r"no \udcff space"

    def test_a_row_of_another_shape_is_refused_by_name(self, folder: Path, store: SqliteStore) -> None:
        store.save({"pod-0": MEMORY})
        with sqlite3.connect(store_path(folder)) as shell:
            shell.execute("""UPDATE slots SET memory = '{"fleet": "pod", "next_number": "many"}'""")
        with pytest.raises(StoreCorrupt, match=r"tpucare\.sqlite: slot pod-0: .*next_number"):
            store.memories()

    @pytest.mark.parametrize(("was", "becomes"), [('"launched":true', '"launched":nul '), ('"step":120', '"step":920')])
    def test_a_digit_that_became_another_is_noticed(
        self, folder: Path, store: SqliteStore, was: str, becomes: str
    ) -> None:
        """
        Flipped bytes went unnoticed: SQLite checks the form of a page, and a wrong memory may have the right form. The
        text of each memory and fleet bears a checksum, and a mismatch is refused as damaged.
        """
        node = NodeMemory("pod-0-a0", "us-central1-a", 7, NOW, launched=True)
        store.save({"pod-0": Memory(fleet="pod", step=120, nodes=(node,))})
        store.save_fleet(FLEET)
        with sqlite3.connect(store_path(folder)) as shell:
            (text,) = shell.execute("SELECT memory FROM slots").fetchone()
            assert was in text
            shell.execute("UPDATE slots SET memory = ?", (text.replace(was, becomes),))
            shell.execute("UPDATE fleets SET record = replace(record, '\"down\"', '\"up\"')")
        with pytest.raises(StoreCorrupt, match=r"slot pod-0: damaged \(its sum does not fit\); .*away"):
            store.memories()
        with pytest.raises(StoreCorrupt, match="fleet pod: damaged"):
            store.fleets()

    def test_a_text_without_a_sum_is_of_an_earlier_version(self, folder: Path, store: SqliteStore) -> None:
        store.save({"pod-0": MEMORY})
        with sqlite3.connect(store_path(folder)) as shell:
            (text,) = shell.execute("SELECT memory FROM slots").fetchone()
            assert text.startswith('{"sum":"')
            shell.execute("UPDATE slots SET memory = ?", ("{" + text[len('{"sum":"01234567",') :],))
        assert store.memories() == {"pod-0": MEMORY}

    def test_threads_may_write_at_the_same_time(self, store: SqliteStore) -> None:
        def write(slot: str) -> None:
            for step in range(20):
                store.save({slot: replace(MEMORY, step=step)}, [event(str(step), slot)])

        threads = [threading.Thread(target=write, args=(f"pod-{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {memory.step for memory in store.memories().values()} == {19}
        assert len(store.events()) == 80


class TestEvents:
    def test_events_come_oldest_first_with_numbers(self, store: SqliteStore) -> None:
        store.save({}, [event("a"), event("b")])
        store.save({"pod-0": MEMORY}, [event("c")])
        told = store.events()
        assert [entry.text for _, entry in told] == ["a", "b", "c"]
        second = told[1][0]
        assert [entry.text for _, entry in store.events(after=second)] == ["c"]
        assert [entry.text for _, entry in store.events(limit=1)] == ["a"]
        assert [entry.text for _, entry in store.last_events(limit=2)] == ["b", "c"]

    def test_fields_keep_their_types(self, store: SqliteStore) -> None:
        fields: dict[str, str | int | float | bool | None] = {"a": True, "b": 1, "c": 1.5, "d": None, "e": "1"}
        store.save({}, [replace(event("x"), fields=fields)])
        back = store.events()[0][1].fields
        assert back == fields
        assert [type(value) for value in back.values()] == [bool, int, float, type(None), str]

    def test_a_fleet_name_selects_the_events_of_its_slots(self, store: SqliteStore) -> None:
        store.save({"odd-name": replace(MEMORY, fleet="pod")})
        slots = ["pod-0", "pod-1", "pods-0", "odd-name", "pod", "", "other-0"]
        store.save({}, [event(slot, slot) for slot in slots])
        store.save({"odd-name": replace(MEMORY, fleet="another")})  # what was told stays the fleet's of then
        assert [entry.slot for _, entry in store.events(slot="pod")] == ["pod-0", "pod-1", "odd-name", "pod"]
        assert [entry.slot for _, entry in store.events(slot="pod-1")] == ["pod-1"]
        assert len(store.events()) == len(slots)

    def test_the_log_is_bounded_and_numbers_are_never_reused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tpucare.adapters.state.store.EVENTS_KEPT", 60)
        monkeypatch.setattr("tpucare.adapters.state.store.EVENTS_KEPT_PER_SLOT", 10)
        monkeypatch.setattr("tpucare.adapters.state.store._TRIM_EVERY", 25)
        with opened(folder) as store:
            store.save({}, [event("quiet", "quiet-0")])
            for number in range(100):
                store.save({}, [event(str(number), "loud-0")])
            kept = store.events(slot="loud-0")
            assert 10 <= len(kept) <= 35
            assert kept[-1][1].text == "99"
            assert [entry.text for _, entry in store.events(slot="quiet-0")] == ["quiet"]
            for number in range(100):
                store.save({}, [event("", f"many-{number}")])
            assert 60 <= len(store.events()) <= 85
            last = store.events()[-1][0]
            assert last == 201
        with sqlite3.connect(store_path(folder)) as shell:
            shell.execute("DELETE FROM events")
        with opened(folder) as store:
            store.save({}, [event("next")])
            assert store.events()[0][0] == last + 1


class TestOwner:
    def test_the_owner_is_made_once_and_fits_a_label(self, folder: Path) -> None:
        with opened(folder) as store:
            owner = store.owner
        assert len(owner) == 14
        assert owner.startswith("o-")
        assert owner[2:].isalnum()
        assert owner == owner.lower()
        with opened(folder) as store:
            assert store.owner == owner
        assert state_folder.read_owner(folder) == owner

    def test_everything_is_private(self, folder: Path, store: SqliteStore) -> None:
        store.save({"pod-0": MEMORY})
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == dict.fromkeys(
            (
                "owner",
                "stores",
                "tpucare.lock",
                "tpucare.sqlite",
                "tpucare.sqlite-wal",
                "tpucare.sqlite-shm",
            ),
            "0o600",
        )

    def test_an_open_folder_is_closed_to_others(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o775)
        opened(folder).close()
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_a_store_missing_beside_its_owner_is_lost_until_confirmed(self, folder: Path) -> None:
        with opened(folder) as store:
            owner = store.owner
            assert not store.lost
        for file in folder.glob("tpucare.sqlite*"):
            file.unlink()
        with opened(folder) as store:
            assert store.lost
            assert store.owner == owner
        with opened(folder) as store:
            assert store.lost
            store.confirm()
            assert not store.lost
        with opened(folder) as store:
            assert not store.lost

    def test_one_that_nobody_had_open_for_ten_minutes_may_be_a_backup(self, folder: Path) -> None:
        with opened(folder) as store:
            assert not store.old, "a new one"
            store.mark_current(NOW + timedelta(minutes=5))
        for minutes, old in ((14.9, False), (15, True), (-4.9, False), (-5, True)):
            with open_store(folder, machine_id=HERE, now=NOW + timedelta(minutes=minutes)) as store:
                assert store.old is old, minutes
        with open_store(folder, machine_id=HERE, now=NOW + timedelta(days=1)) as store:
            store.confirm()
            assert not store.old

    @pytest.mark.parametrize("text", ["", "yesterday", "2026-01-01T00:00:00"])
    def test_a_mark_that_says_nothing_counts_as_old(self, folder: Path, text: str) -> None:
        with opened(folder) as store:
            path = store.path
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE meta SET value = ? WHERE key = 'marked'", (text,))
        with opened(folder) as store:
            assert store.old

    def test_only_the_owner_file_is_left(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        (folder / "owner").write_text("o-abcdefghij23\n")
        with opened(folder) as store:
            assert store.lost
            assert store.owner == "o-abcdefghij23"

    def test_a_second_store_of_an_owner_is_new_not_lost(self, folder: Path) -> None:
        with opened(folder) as first, opened(folder, name="sweep-1") as second:
            assert not second.lost
            assert second.owner == first.owner
        store_path(folder, "sweep-1").unlink()
        with opened(folder, name="sweep-1") as second:
            assert second.lost

    def test_a_kill_between_store_and_owner_file_loses_nothing(self, folder: Path) -> None:
        with opened(folder) as store:
            owner = store.owner
        (folder / "owner").unlink()
        (folder / "stores").unlink()
        with opened(folder) as store:
            assert (store.owner, store.lost) == (owner, False)
        assert state_folder.read_owner(folder) == owner

    def test_a_half_made_store_is_made_again(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        (folder / "tpucare.sqlite.new").write_bytes(b"half")
        with opened(folder) as store:
            assert not store.lost
        assert not (folder / "tpucare.sqlite.new").exists()

    def test_a_store_of_another_owner_is_refused(self, folder: Path) -> None:
        opened(folder).close()
        (folder / "owner").write_text("o-222222222222\n")
        with pytest.raises(StoreForeign, match="o-222222222222"):
            opened(folder)

    def test_an_unreadable_owner_is_refused(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "owner").write_text("")
        with pytest.raises(StoreCorrupt, match="not an owner id"):
            opened(folder)
        assert not store_path(folder).exists()


class TestMachine:
    def test_a_copied_store_is_refused_until_the_move_is_accepted(self, folder: Path) -> None:
        with opened(folder) as store:
            store.save({"pod-0": MEMORY})
        before = store_path(folder).read_bytes()
        with pytest.raises(StoreForeign, match="confirm --moved"):
            opened(folder, machine_id=ELSEWHERE)
        assert store_path(folder).read_bytes() == before
        accept_move(folder, machine_id=ELSEWHERE, now=NOW)
        with opened(folder, machine_id=ELSEWHERE) as store:
            assert store.lost  # the old machine may have gone on after the copy
            assert store.memories() == {"pod-0": MEMORY}
        with pytest.raises(StoreForeign):
            opened(folder)

    def test_accepting_a_move_that_did_not_happen_changes_nothing(self, folder: Path) -> None:
        opened(folder).close()
        accept_move(folder, machine_id=HERE, now=NOW)
        with opened(folder) as store:
            assert not store.lost

    def test_a_clone_of_the_disk_is_another_machine(self, folder: Path) -> None:
        """A snapshot or a machine image has the same machine id: both daemons cared for the same slots."""
        on(folder, "11").close()
        with pytest.raises(StoreForeign, match="confirm --moved"):
            on(folder, "22")
        accept_move(folder, machine_id=HERE, instance_id="22", now=NOW)
        with on(folder, "22") as store:
            assert store.lost
        with pytest.raises(StoreForeign):
            on(folder, "11")

    def test_a_store_that_knows_the_machine_id_alone_is_taken_over_without_a_word(self, folder: Path) -> None:
        with opened(folder) as store:
            assert store.machine == state_folder.machine_fingerprint(HERE)
        with on(folder, "11") as store:
            assert (store.machine, store.lost) == (state_folder.machine_fingerprint(HERE, "11"), False)
        with pytest.raises(StoreForeign):
            on(folder, "22")
        with pytest.raises(StoreForeign):
            on(folder, "11", machine_id=ELSEWHERE)

    def test_a_metadata_server_that_does_not_answer_refuses_and_forgets_nothing(self, folder: Path) -> None:
        on(folder, "11").close()
        with on(folder, "") as store:
            assert store.machine == state_folder.machine_fingerprint(HERE, "11")
        accept_move(folder, machine_id=HERE, now=NOW)
        with on(folder, "11") as store:
            assert not store.lost

    def test_the_machine_id_itself_is_not_kept(self, folder: Path) -> None:
        opened(folder).close()
        assert HERE.encode() not in store_path(folder).read_bytes()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2048])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 * 2 : 4096 * 5] = random.Random(7).randbytes(4096 * 3)
    path.write_bytes(content)


def replace_by_text(path: Path) -> None:
    path.write_text("name: pod\n" * 40)


def make_newer(path: Path) -> None:
    with sqlite3.connect(path) as shell:
        shell.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    shell.close()


def replace_by_other_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as shell:
        shell.execute("CREATE TABLE photos (name TEXT)")
    shell.close()


def forget_meta(path: Path) -> None:
    with sqlite3.connect(path) as shell:
        shell.execute("DELETE FROM meta")
    shell.close()


class TestRefused:
    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (cut, "damaged"),
            (empty, "cut short"),
            (cut_in_the_header, "cut short"),
            (overwrite, "damaged"),
            (replace_by_text, "not a SQLite file"),
            (make_newer, "newer tpucare"),
            (replace_by_other_database, "not a store of tpucare"),
            (forget_meta, "no owner is noted"),
        ],
    )
    def test_a_file_that_cannot_be_trusted_is_left_untouched(
        self, folder: Path, damage: Callable[[Path], None], says: str
    ) -> None:
        path = store_path(folder)
        with opened(folder) as store:
            store.save({f"pod-{number}": MEMORY for number in range(100)})
        damage(path)
        before = path.read_bytes()
        for _ in range(2):
            with pytest.raises(StoreCorrupt, match=says) as caught:
                opened(folder)
            assert path.read_bytes() == before
            assert "\n" not in str(caught.value)
            assert str(path) in str(caught.value)
            assert "away" in str(caught.value)
        assert holder(folder) is None

    def test_moved_away_as_told_it_starts_as_lost(self, folder: Path) -> None:
        opened(folder).close()
        empty(store_path(folder))
        with pytest.raises(StoreCorrupt):
            opened(folder)
        store_path(folder).rename(folder / "bad")
        with opened(folder) as store:
            assert store.lost

    def test_a_log_without_its_file_is_not_replayed_into_the_next(self, folder: Path, tmp_path: Path) -> None:
        with opened(folder) as store:
            store.save({"old-0": MEMORY})
            shutil.copy(folder / "tpucare.sqlite-wal", tmp_path / "log")
        store_path(folder).unlink()
        shutil.copy(tmp_path / "log", folder / "tpucare.sqlite-wal")
        with opened(folder) as store:
            assert store.lost
            assert store.memories() == {}
        assert list(folder.glob("tpucare.sqlite-wal.left-*"))

    def test_a_file_deleted_in_use_is_noticed(self, folder: Path, store: SqliteStore) -> None:
        store.save({"pod-0": MEMORY})
        store_path(folder).unlink()
        with pytest.raises(StoreError, match="deleted or replaced"):
            store.save({"pod-1": MEMORY})

    @pytest.mark.parametrize("name", ["", "../up", "Name", "a/b", ".hidden"])
    def test_a_name_that_is_no_file_name(self, folder: Path, name: str) -> None:
        with pytest.raises(StoreError, match="no name for a store"):
            opened(folder, name=name)

    def test_a_folder_that_is_a_file(self, folder: Path) -> None:
        folder.write_text("")
        with pytest.raises(StoreError, match="cannot be used"):
            opened(folder)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_a_folder_of_another_user(self, folder: Path) -> None:
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        with pytest.raises(StoreError, match="run this as"):
            opened(folder)
        assert list(folder.iterdir()) == []

    def test_a_folder_that_cannot_be_written(self, folder: Path) -> None:
        said = in_a_process(
            """
            import os, tempfile
            if os.geteuid() == 0:  # root may write anywhere
                os.seteuid(65534)
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                opened().close()
                for mode, entry in ((0o400, folder / "tpucare.sqlite"), (0o500, folder)):
                    os.chmod(entry, mode)
                    say(opened)
                os.chmod(folder, 0o700)
            """,
            folder,
        )
        file, whole = said.splitlines()
        assert file.startswith("StoreError")
        assert "readonly" in file
        assert whole.startswith("StoreError")

    def test_a_locked_database_is_named_as_such(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(schema, "BUSY_SECONDS", 0.05)
        with opened(folder) as store:
            shell = sqlite3.connect(store_path(folder), isolation_level=None)
            shell.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked"):
                store.save({"pod-0": MEMORY})
            shell.execute("ROLLBACK")
            shell.close()
            store.save({"pod-0": MEMORY})


class TestContexts:
    def test_they_are_kept_until_they_are_dropped(self, folder: Path) -> None:
        with opened(folder) as store:
            store.save_context("pod-0", "1")
            store.save_context("pod-0", "2")
            store.save_context("pod-1", "3")
        with opened(folder) as store, open_reader(folder) as reader:
            assert (store.context("pod-0"), reader.context("pod-1"), store.context("other")) == ("2", "3", None)
            store.drop_context("pod-0")
            assert store.context("pod-0") is None


class TestSchema:
    def test_version_1_is_read_by_every_later_version(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        shell = sqlite3.connect(store_path(folder))
        shell.executescript(VERSION_1.format(machine=state_folder.machine_fingerprint(HERE)))
        shell.close()
        with opened(folder) as store:
            assert store.owner == "o-abcdefghij23"
            assert not store.lost
            node = NodeMemory("pod-0-a1", "us-central1-a", 7, NOW)
            assert store.memories() == {"pod-0": Memory(fleet="pod", next_number=2, attempts=1, nodes=(node,))}
            assert store.fleets() == {"pod": FleetRecord("pod", "name: pod", "/f", NOW)}
            assert store.events() == [(41, Event(NOW, "create", "hello"))]
            store.save({"pod-0": MEMORY}, [event("more")])
            assert store.events()[-1][0] == 42
            store.save_context("pod-0", "1")
            assert store.context("pod-0") == "1"

    def test_a_reader_of_version_1_knows_of_no_contexts(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        shell = sqlite3.connect(store_path(folder))
        shell.executescript(VERSION_1.format(machine=state_folder.machine_fingerprint(HERE)))
        shell.close()
        with open_reader(folder) as reader:
            assert reader.context("pod-0") is None

    def test_a_migration_is_made_once_and_whole(self, tmp_path: Path) -> None:
        steps = (("CREATE TABLE a (x)",), ("ALTER TABLE a ADD COLUMN y", "INSERT INTO a VALUES (1, 2)"))
        shell = sqlite3.connect(tmp_path / "file", isolation_level=None)
        schema.migrate(shell, steps[:1])
        with pytest.raises(sqlite3.OperationalError):
            schema.migrate(shell, (*steps[:1], ("INSERT INTO a VALUES (5)", "SELECT nonsense FROM nowhere")))
        assert shell.execute("SELECT count(*) FROM a").fetchone() == (0,)
        for _ in range(2):
            schema.migrate(shell, steps)
        assert shell.execute("SELECT * FROM a").fetchall() == [(1, 2)]
        assert shell.execute("PRAGMA user_version").fetchone() == (2,)

    def test_a_commit_is_synced(self, store: SqliteStore) -> None:
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)


class TestLock:
    def test_a_second_daemon_is_told_who_holds_the_store(self, folder: Path) -> None:
        assert holder(folder) is None
        with opened(folder) as store:
            store.save({"pod-0": MEMORY})
            said = in_a_process("say(opened)", folder)
            assert said.startswith("StoreLocked")
            assert f"process {os.getpid()} " in said
            assert holder(folder) == os.getpid()
        assert holder(folder) is None
        assert in_a_process("say(opened)", folder) == "ok"

    def test_the_same_process_cannot_open_it_twice(self, folder: Path, store: SqliteStore) -> None:
        with pytest.raises(StoreLocked):
            opened(folder)
        with pytest.raises(StoreLocked):
            accept_move(folder, machine_id=ELSEWHERE, now=NOW)

    def test_a_killed_process_holds_nothing(self, folder: Path) -> None:
        writer = start_writer(folder)
        assert acknowledged(writer) == 0
        with pytest.raises(StoreLocked, match=f"process {writer.pid} "):
            opened(folder)
        kill(writer)
        opened(folder).close()


class TestReader:
    def test_a_reader_sees_one_moment_until_it_looks_again(self, folder: Path, store: SqliteStore) -> None:
        store.save({"pod-0": MEMORY}, [event("a")])
        store.save_fleet(FLEET)
        with open_reader(folder) as reader:
            store.save({"pod-1": MEMORY}, [event("b")])
            assert set(reader.memories()) == {"pod-0"}
            assert reader.fleets() == {"pod": FLEET}
            assert [entry.text for _, entry in reader.events()] == ["a"]
            assert (reader.owner, reader.lost) == (store.owner, False)
            reader.refresh()
            assert set(reader.memories()) == {"pod-0", "pod-1"}

    def test_a_reader_does_not_stop_the_writer(self, folder: Path, store: SqliteStore) -> None:
        with open_reader(folder) as reader:
            for step in range(50):
                store.save({"pod-0": replace(MEMORY, step=step)})
            assert reader.memories() == {}

    def test_a_reader_creates_nothing(self, folder: Path) -> None:
        with pytest.raises(StoreError, match="no store here"):
            open_reader(folder)
        assert not folder.exists()
        with opened(folder) as store:
            store.save({"pod-0": MEMORY})
        before = sorted(folder.iterdir())
        with open_reader(folder) as reader:
            assert reader.memories() == {"pod-0": MEMORY}
            assert sorted(folder.iterdir()) == before
        assert sorted(folder.iterdir()) == before

    def test_what_a_killed_writer_left_in_its_log_is_read(self, folder: Path) -> None:
        writer = start_writer(folder)
        while acknowledged(writer) < 5:
            pass
        kill(writer)
        before = sorted(folder.iterdir())
        with open_reader(folder) as reader:
            step = reader.memories()["pod-0"].step
            assert step is not None
            assert step >= 5
        assert sorted(folder.iterdir()) == before

    def test_a_reader_refuses_what_the_daemon_refuses(self, folder: Path) -> None:
        opened(folder).close()
        make_newer(store_path(folder))
        with pytest.raises(StoreCorrupt, match="newer tpucare"):
            open_reader(folder)
        replace_by_text(store_path(folder))
        with pytest.raises(StoreCorrupt, match="not a SQLite file"):
            open_reader(folder)


def log_bytes(folder: Path) -> int:
    return store_path(folder).with_name("tpucare.sqlite-wal").stat().st_size


def read_steps(folder: Path) -> int | None:
    """The step of all slots, which each transaction of the writers below makes equal."""
    with open_reader(folder) as store:
        found = {memory.step for memory in store.memories().values()}
    assert len(found) == 1, found
    return found.pop()


def wide(step: int) -> dict[str, Memory]:
    return {f"pod-{index}": replace(MEMORY, step=step, end_why="x" * 2000) for index in range(40)}


class TestReaderAndWriterStandStill:
    @pytest.mark.parametrize("step", [31, pytest.param(5, marks=pytest.mark.slow)])
    def test_a_reader_stopped_at_any_line_stops_nobody_and_no_log_grows(self, folder: Path, step: int) -> None:
        """With SQLite's lock of a reader, the log grew for as long as one was stopped (Ctrl-Z in `events --follow`)."""
        with opened(folder) as store:
            store._connection.execute("PRAGMA wal_autocheckpoint = 20")
            count = 0
            store.save(wide(count))
            for child in stopped_at_each_line(lambda: read_steps(folder), "adapters/state/", step=step):
                for _ in range(20):
                    count += 1
                    store.save(wide(count))
                assert log_bytes(folder) < 1 << 20, f"line {child.line}"
                child.go_on()
            assert read_steps(folder) == count

    def test_a_writer_stopped_at_any_moment_keeps_no_reader_waiting(self, folder: Path, tmp_path: Path) -> None:
        """Between its lines, too: within a commit, or while SQLite folds the log into the file."""
        code = f"""
            from pathlib import Path
            from tests.adapters.test_store import opened, wide
            with opened(Path({str(folder)!r})) as store:
                store._connection.execute("PRAGMA wal_autocheckpoint = 20")
                step = 0
                while True:
                    store.save(wide(step))
                    step += 1
                    if step == 1:
                        print("ready", flush=True)
        """
        rng = random.Random(1)
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as writer:
            try:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"ready\n"
                last = -1
                for _ in range(60):
                    time.sleep(rng.uniform(0, 0.02))
                    writer.send_signal(signal.SIGSTOP)
                    began = time.monotonic()
                    found = read_steps(folder)
                    assert time.monotonic() - began < 2.0
                    assert found is not None
                    assert found >= last
                    last = found
                    writer.send_signal(signal.SIGCONT)
                    read_steps(folder)
            finally:
                writer.kill()

    def test_a_reader_needs_no_room_on_a_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened(folder).close()
        monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
        with open_reader(folder) as reader:
            assert reader.memories() == {}

    def test_to_read_in_the_process_that_writes_keeps_its_locks(self, folder: Path, store: SqliteStore) -> None:
        """
        To close a file means to lose all locks of the process on it (fcntl(2)): a shell on the store that ended after
        that took itself for the last one, and deleted the log that the daemon went on to write.
        """
        store.save({"pod-0": MEMORY})
        with open_reader(folder) as reader:
            assert set(reader.memories()) == {"pod-0"}
        shell = f"import sqlite3; c = sqlite3.connect({str(store.path)!r}); c.execute('SELECT * FROM slots'); c.close()"
        subprocess.run([sys.executable, "-c", shell], check=True)
        store.save({"pod-1": MEMORY})
        assert log_bytes(folder) > 0
        assert in_a_process("print(*open_reader(folder).memories())", folder) == "pod-0 pod-1"


class TestDiskFull:
    def test_a_save_that_does_not_fit_is_not_made_at_all(self, store: SqliteStore) -> None:
        store.save({"pod-0": MEMORY}, [event("a")])
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        long = replace(MEMORY, end_why="x" * 30_000)
        with pytest.raises(StoreFull, match="disk full"):
            store.save({"pod-0": replace(MEMORY, step=130), "pod-1": long}, [event("b")])
        assert store.memories() == {"pod-0": MEMORY}
        assert [entry.text for _, entry in store.events()] == ["a"]
        store._connection.execute("PRAGMA max_page_count = 1000000")
        store.save({"pod-1": long})
        assert store.memories()["pod-1"] == long

    def test_a_limit_of_the_operating_system(self, folder: Path) -> None:
        said = in_a_process(
            """
            import resource
            store = opened()
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
            def fill():
                for fill.step in range(10_000):
                    store.save({"pod-0": Memory(fleet="pod", step=fill.step)})
            say(fill)
            assert store.memories()["pod-0"].step == fill.step - 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            store.save({"pod-0": Memory(fleet="pod", step=-1)})
            """,
            folder,
        )
        assert said.startswith("StoreFull"), said
        with opened(folder) as store:
            assert store.memories()["pod-0"].step == -1


class TestCrash:
    def test_killed_at_any_moment_it_keeps_what_it_acknowledged(self, folder: Path) -> None:
        rng = random.Random(20)
        last = -1
        for _ in range(20):
            writer = start_writer(folder, first=last + 1)
            timer = threading.Timer(rng.uniform(0.0, 0.12), os.kill, (writer.pid, signal.SIGKILL))
            # The first lines: it is up, and goes on however slow the disk is.
            promised = max(last, *(acknowledged(writer) for _ in range(2)))
            timer.start()
            while (step := acknowledged(writer)) >= 0:
                promised = step
            timer.join()
            kill(writer)
            with opened(folder) as store:
                steps = {memory.step for memory in store.memories().values()}
                assert len(steps) == 1  # both slots of a save, or none
                (found,) = steps
                assert found in (promised, promised + 1)
                (_, told) = store.last_events(limit=1)[0]
                assert told.text == str(found)
                assert not store.lost
                last = found
        assert last > 20


class TestSpeed:
    def test_ten_thousand_slots(self, folder: Path) -> None:
        with opened(folder) as store:
            store.save({f"pod-{number}": MEMORY for number in range(10_000)})
        used = resource.getrusage(resource.RUSAGE_THREAD).ru_utime
        with opened(folder) as store:
            assert len(store.memories()) == 10_000
        # Processor time of this thread, and three times what it takes on a quiet core: other tests share this machine.
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_utime - used < timedelta(seconds=3).total_seconds()


PROLOGUE = """
from datetime import UTC, datetime
from pathlib import Path
from tpucare.model.errors import StoreError
from tpucare.model.memory import Memory
from tpucare.model.resources import Event
from tpucare.adapters.state.store import open_reader, open_store
import sys

folder = Path(sys.argv[1])
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)

def opened():
    return open_store(folder, machine_id="4f6b1c1a8b6d4f7f9d3f0a2b5c6d7e8f", now=NOW)

def say(call):
    try:
        call()
        print("ok")
    except StoreError as error:
        print(type(error).__name__, error)
"""

WRITER = """
store = opened()
step = int(sys.argv[2])
while True:
    memory = Memory(fleet="pod", step=step)
    store.save({"pod-0": memory, "pod-1": memory}, [Event(NOW, "step", str(step), "pod-0")])
    print(step, flush=True)
    step += 1
"""


def in_a_process(script: str, folder: Path) -> str:
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(script), str(folder)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout.strip()


def start_writer(folder: Path, first: int = 0) -> subprocess.Popen[str]:
    """A process that saves two slots and an event in a loop and prints each step once it is acknowledged."""
    command = [sys.executable, "-c", PROLOGUE + WRITER, str(folder), str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def acknowledged(writer: subprocess.Popen[str]) -> int:
    """The next step that the writer printed whole, or -1 when it is dead and nothing is left to read."""
    assert writer.stdout is not None
    line = writer.stdout.readline()
    return int(line) if line.endswith("\n") else -1


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("step", [19, pytest.param(2, marks=pytest.mark.slow)])
def test_a_process_stopped_at_any_line_of_its_start_holds_up_no_other(tmp_path: Path, step: int) -> None:
    """
    Stores are made without a lock that they share: one that was stopped while it held that lock kept every other
    process of the folder from its own store for 30 s, and then refused it.
    """
    folder = tmp_path / "0"

    def start() -> None:
        opened(folder, name="a").close()

    for child in stopped_at_each_line(start, "adapters/state/", step=step):
        began = time.monotonic()
        with opened(folder, name="b") as store:
            owner, lost = store.owner, store.lost
        assert time.monotonic() - began < 2.0, f"line {child.line}"
        assert not lost
        if child.line % 2:
            child.go_on()
        else:
            child.kill()
        with opened(folder, name="a") as store:
            assert (store.owner, store.lost) == (owner, False), f"line {child.line}"
        assert sorted(state_folder.known_stores(folder) or ()) == ["a", "b"]
        folder = tmp_path / str(child.line)


def test_a_process_that_asks_who_holds_a_store_keeps_nobody_out(folder: Path) -> None:
    """To ask meant to hold the lock for a moment: one that was stopped then kept the store from its own caretaker."""
    opened(folder).close()
    for child in stopped_at_each_line(lambda: holder(folder), "adapters/state/folder.py"):
        opened(folder).close()
        child.go_on()


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(folder: Path) -> None:
    code = f"""
        import os, sys, time
        from pathlib import Path
        from tpucare.adapters.state.folder import StoreLock
        lock = StoreLock(Path({str(folder)!r}) / "tpucare.lock")
        if not os.fork():
            print(os.getpid(), flush=True)
        time.sleep(600)
    """
    folder.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(10)
        try:
            opened(folder).close()
        finally:
            os.kill(child, signal.SIGKILL)


FIRST = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from tpucare.adapters.state.store import open_store

sys.stdin.readline()
with open_store(Path(sys.argv[1]), machine_id="m", now=datetime.now(UTC), name=sys.argv[2]) as store:
    print(store.owner, store.lost)
"""


def test_first_stores_that_are_made_at_once_have_one_owner(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    pipe = subprocess.PIPE
    made = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST, str(folder), f"s{index}"], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        for index in range(6)
    ]
    for process in made:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = {process.communicate(timeout=60) for process in made}
    assert len(said) == 1
    ((out, err),) = said
    assert out.endswith("False\n")
    assert err == ""
    assert sorted(state_folder.known_stores(folder) or ()) == [f"s{index}" for index in range(6)]
