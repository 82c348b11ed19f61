"""Flags, environment and a running emulator -> where everything is; and where secrets come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpucare.model.errors import ConfigError
from tpucare.service import emulator_address
from tpucare.service.assembly import secrets_of, settings_of
from tpucare.service.options import FLEETS_NOTE, resolve

HOME = {"HOME": "/home/me"}


@pytest.mark.parametrize(
    ("env", "state", "want"),
    [
        ({}, "", "/home/me/.local/state/tpucare"),
        ({"STATE_DIRECTORY": "/var/lib/tpucare:/var/lib/other"}, "", "/var/lib/tpucare"),
        ({"STATE_DIRECTORY": "/var/lib/tpucare", "TPUCARE_STATE": "/env"}, "", "/env"),
        ({"TPUCARE_STATE": "/env"}, "/flag", "/flag"),
        ({"TPUCARE_ENDPOINT": "127.0.0.1:80"}, "", "/home/me/.local/state/tpucare/endpoints/127.0.0.1_80"),
        ({"TPUCARE_ENDPOINT": "127.0.0.1:80", "TPUCARE_STATE": "/env"}, "", "/env"),
    ],
)
def test_the_state_folder_and_what_goes_before_what(env: dict[str, str], state: str, want: str) -> None:
    assert str(resolve({**HOME, **env}, state=state).state) == want


def test_an_emulator_gives_everything_and_keeps_its_state_apart(tmp_path: Path) -> None:
    found = emulator_address.Running("127.0.0.1:4711", "sock", "emulated", os.getpid(), 2222, "root")
    emulator_address.announce(tmp_path, found)
    options = resolve({**HOME, "TPUCARE_EMULATOR": str(tmp_path), "TPUCARE_ENDPOINT": "other:1"})
    assert (options.endpoint, options.project) == ("127.0.0.1:4711", "emulated")
    assert (options.ssh_user, options.ssh_port) == ("root", 2222)
    assert options.state == tmp_path / "tpucare"
    chosen = resolve({**HOME, "TPUCARE_SSH_USER": "me", "TPUCARE_SSH_PORT": "23"}, emulator=str(tmp_path), project="p")
    assert (chosen.ssh_user, chosen.ssh_port, chosen.project) == ("me", 23, "p")


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9"])
def test_a_beat_that_is_no_sensible_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="TPUCARE_POLL"):
        resolve({**HOME, "TPUCARE_POLL": value})


@pytest.mark.parametrize("project", ["a b", "a\udcff", "gr\u00e4nt", "a\nb"])
def test_a_project_that_no_api_could_know_is_refused(project: str) -> None:
    with pytest.raises(ConfigError, match="is not a project id"):
        resolve({**HOME, "TPUCARE_PROJECT": project})
    with pytest.raises(ConfigError, match="is not a project id"):
        resolve(HOME, project=project)
    assert resolve(HOME, project="example.com:grant").project == "example.com:grant"


def test_a_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="~nobody-here/x: no home"):
        resolve({**HOME, "TPUCARE_STATE": "~nobody-here/x"})


def test_a_fast_beat_is_never_slower_than_the_usual_one() -> None:
    settings = settings_of(resolve({**HOME, "TPUCARE_POLL": "0.5", "TPUCARE_PROBE": "0.2"}))
    assert (settings.poll, settings.fast_poll, settings.probe, settings.fast_probe) == (0.5, 0.5, 0.2, 0.2)


def test_fleets_lie_where_the_last_daemon_looked(tmp_path: Path) -> None:
    options = resolve({**HOME, "TPUCARE_STATE": str(tmp_path)})
    assert options.fleets({}) == tmp_path / "fleets"
    (tmp_path / FLEETS_NOTE).write_text("/etc/tpucare/fleets\n")
    assert options.fleets({}) == Path("/etc/tpucare/fleets")
    assert options.fleets({"TPUCARE_FLEETS": "/srv/fleets"}) == Path("/srv/fleets")


def test_a_secret_is_a_credential_file_before_it_is_a_variable(tmp_path: Path) -> None:
    (tmp_path / "TOKEN").write_text("from file\n")
    secret = secrets_of({"CREDENTIALS_DIRECTORY": str(tmp_path), "TOKEN": "from env", "OTHER": "env"})
    assert secret("TOKEN") == "from file"
    assert secret("OTHER") == "env"
    assert secret("MISSING") is None
    assert secret("../TOKEN") is None


def test_a_credential_that_cannot_be_read_is_named_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "TOKEN").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="secret TOKEN") as caught:
        secrets_of({"CREDENTIALS_DIRECTORY": str(tmp_path), "TOKEN": "x"})("TOKEN")
    assert "xff" not in str(caught.value)
