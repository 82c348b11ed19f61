"""What stores of one folder tell each other of markets is advice: a damaged file costs knowledge, never an error."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tpucare.adapters.state import market_files
from tpucare.adapters.state.market_files import FILE_LIMIT_BYTES, FOLDER, MarketFiles, read_markets
from tpucare.model.markets import Experience

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
NAME = "us-central1-a/v4-8/spot"
SEEN = Experience(as_of=NOW, asked=3, refused=2, given=1, lived_hours=5, asked_first=NOW - timedelta(hours=9))
LEARNED = {"grant": {NAME: SEEN}}


def test_what_one_store_learned_outlives_it_and_reaches_the_others(tmp_path: Path) -> None:
    first, second = MarketFiles(tmp_path, "daemon"), MarketFiles(tmp_path, "pod.grant")
    assert (first.own(), first.of_others()) == ({}, [])
    first.save(LEARNED)
    assert MarketFiles(tmp_path, "daemon").own() == LEARNED
    assert MarketFiles(tmp_path, "daemon").of_others() == []
    assert (second.own(), second.of_others()) == ({}, [LEARNED])
    second.save({})
    assert read_markets(tmp_path) == {"daemon": LEARNED, "pod.grant": {}}


def test_a_name_of_a_store_is_one_file_of_the_folder(tmp_path: Path) -> None:
    MarketFiles(tmp_path, "a b/../%2e").save(LEARNED)
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / FOLDER]
    assert read_markets(tmp_path) == {"a b/../%2e": LEARNED}


def whole(**changes: object) -> bytes:
    plain = {"as_of": NOW.isoformat(), "asked": 1.0, **changes}
    return json.dumps({"grant": {NAME: plain, "other": {"asked": 2.0}}}).encode()


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", set()),
        (b"\0" * 4096, set()),
        (whole()[:-9], set()),
        (b"[]", set()),
        (b'{"grant": {"x": {"asked": "many"}}}', set()),
        (b"[" * 100_000, set()),
        (b" " * (FILE_LIMIT_BYTES + 1), set()),
        (whole(of_a_later_version=3), {NAME, "other"}),
        (whole(asked=-1.0), {"other"}),
        (whole(readied=float("nan")), {"other"}),
        (whole(lived_hours=float("inf")), {"other"}),
        (whole(as_of="2026-11-01T12:00:00"), {"other"}),
    ],
    ids=[
        *("empty", "zeros of a lost power supply", "cut off", "a list", "text for a number", "deep", "too long"),
        *("a key of a later version", "below zero", "no number", "endless", "without a time zone"),
    ],
)
def test_a_damaged_file_costs_what_is_damaged(tmp_path: Path, content: bytes, kept: set[str]) -> None:
    files = MarketFiles(tmp_path, "daemon")
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "daemon.json").write_bytes(content)
    assert set(files.own().get("grant", {})) == kept
    files.save(LEARNED)
    assert files.own() == LEARNED


def in_the_way_folder(state: Path) -> None:
    (state / FOLDER).write_text("a file")


def in_the_way_file(state: Path) -> None:
    (state / FOLDER / "daemon.json").mkdir(parents=True)


@pytest.mark.parametrize("block", [in_the_way_folder, in_the_way_file])
def test_what_cannot_be_written_or_read_is_no_error(tmp_path: Path, block: Callable[[Path], None]) -> None:
    block(tmp_path)
    files = MarketFiles(tmp_path, "daemon")
    files.save(LEARNED)
    assert files.own() == {}
    assert files.of_others() == []


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MarketFiles(tmp_path, "daemon")
    files.save(LEARNED)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(market_files, "replace_file", full)
    files.save({})
    assert files.own() == LEARNED


def test_a_reader_sees_whole_files_while_others_write(tmp_path: Path) -> None:
    writers = [MarketFiles(tmp_path, f"store-{number}") for number in range(4)]
    grown = [{"grant": {f"zone-{index}/v4-8/spot": SEEN for index in range(size)}} for size in (1, 40, 400)]
    ended = threading.Event()

    def write(files: MarketFiles) -> None:
        while not ended.is_set():
            for learned in grown:
                files.save(learned)

    threads = [threading.Thread(target=write, args=(files,)) for files in writers]
    for thread in threads:
        thread.start()
    sizes = set()
    try:
        for _ in range(60):
            for known in read_markets(tmp_path).values():
                sizes.add(len(known.get("grant", {})))
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert sizes
    assert sizes <= {1, 40, 400}
    assert [files.own() for files in writers] == [grown[-1]] * 4
