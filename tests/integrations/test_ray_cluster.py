"""Files of a Ray cluster in the state folder: the head's record and the token."""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tpucare.integrations.ray.cluster import (
    HeadRecord,
    cluster_folder,
    clusters,
    make_token,
    read_head,
    token_variable,
    write_head,
)
from tpucare.model.errors import ConfigError

HEAD = HeadRecord(
    cluster="lab",
    address="10.0.0.2:6379",
    dashboard="127.0.0.1:8265",
    python="/opt/ray/bin/python",
    ray="2.60.0",
    python_version="3.11",
    token="/state/secrets/TPUCARE_RAY_TOKEN_LAB",
    started_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
)


def test_a_record_is_read_as_it_was_written_and_is_private(tmp_path: Path) -> None:
    assert read_head(tmp_path, "lab") is None
    assert clusters(tmp_path) == ()
    for name in ("lab", "a-b"):
        write_head(tmp_path, dataclasses.replace(HEAD, cluster=name))
    assert read_head(tmp_path, "lab") == HEAD
    assert clusters(tmp_path) == ("a-b", "lab")
    (tmp_path / "ray" / "lab-1").mkdir()
    (tmp_path / "ray" / "lab-1" / "head.json").write_text("no cluster has such a name")
    assert clusters(tmp_path) == ("a-b", "lab")
    path = cluster_folder(tmp_path, "lab") / "head.json"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        "[" * 60_000,
        "\0",
        b"\xff\xfe",
        *(
            json.dumps({**HEAD.as_json(), **wrong})
            for wrong in (
                {"address": "10.0.0.2"},
                {"address": "10.0.0.2:99999"},
                {"dashboard": 8265},
                {"python": "python3"},
                {"ray": "2.60\n"},
                {"token": ""},
                {"started_at": "2026-01-02T03:04:05"},
                {"started_at": "yesterday"},
                {"cluster": "other"},
            )
        ),
    ],
)
def test_a_record_of_nonsense_is_one_line_that_names_the_file(content: str | bytes, tmp_path: Path) -> None:
    path = cluster_folder(tmp_path, "lab") / "head.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"lab/head\.json: .*tpucare ray head lab") as caught:
        read_head(tmp_path, "lab")
    assert "\n" not in str(caught.value)


def test_a_record_that_another_could_have_written_is_refused(tmp_path: Path) -> None:
    """The daemon runs the Python that it names."""
    write_head(tmp_path, HEAD)
    path = cluster_folder(tmp_path, "lab") / "head.json"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users"):
        read_head(tmp_path, "lab")
    (tmp_path / "elsewhere").write_text("{}")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_head(tmp_path, "lab")


@pytest.mark.parametrize("name", ["", "Lab", "../lab", "lab-1", "lab-a2", "a/b", "x" * 25, "."])
def test_a_cluster_is_named_like_a_fleet(name: str, tmp_path: Path) -> None:
    for act in (cluster_folder, read_head, make_token):
        with pytest.raises(ConfigError, match=r"cluster .* must "):
            act(tmp_path, name)
    with pytest.raises(ConfigError, match=r"cluster .* must "):
        token_variable(name)
    assert list(tmp_path.iterdir()) == []


def test_a_token_is_made_once_and_is_private(tmp_path: Path) -> None:
    assert token_variable("my-lab") == "TPUCARE_RAY_TOKEN_MY_LAB"
    path = make_token(tmp_path, "my-lab")
    assert path == tmp_path / "secrets" / "TPUCARE_RAY_TOKEN_MY_LAB"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    token = path.read_text()
    assert len(token) == 64
    assert int(token, 16)
    assert make_token(tmp_path, "my-lab").read_text() == token
    assert make_token(tmp_path, "lab").read_text() != token


def test_a_token_that_others_know_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = make_token(tmp_path, "lab")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="token cannot be read: is open to other users"):
        make_token(tmp_path, "lab")
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(ConfigError, match="is not a token"):
        make_token(tmp_path, "lab")
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        make_token(tmp_path, "lab")
