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
    secret = secrets_of({"CREDENTIALS_DIRECTORY": str(tmp_path), "TOKEN": "from env", "OTHER": "env"}, tmp_path / "own")
    assert secret("TOKEN") == "from file"
    assert secret("OTHER") == "env"
    assert secret("MISSING") is None
    assert secret("../TOKEN") is None


def test_a_credential_that_cannot_be_read_is_named_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "TOKEN").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="secret TOKEN") as caught:
        secrets_of({"CREDENTIALS_DIRECTORY": str(tmp_path), "TOKEN": "x"}, tmp_path)("TOKEN")
    assert "xff" not in str(caught.value)


def test_a_token_of_a_ray_cluster_is_a_private_file_of_the_state_folder(tmp_path: Path) -> None:
    """The head makes it while the daemon runs, so it is read at each launch; no other name is ever read from there."""
    name, own = "TPUCARE_RAY_TOKEN_LAB", tmp_path / "secrets"
    secret = secrets_of({name: "from env", "WANDB_API_KEY": "from env"}, own)
    assert secret(name) == "from env"
    own.mkdir()
    for file in (name, "WANDB_API_KEY", "TPUCARE_RAY_TOKEN_", "TPUCARE_RAY_TOKEN_lab"):
        (own / file).write_text("ab12\n")
        (own / file).chmod(0o600)
    assert secret(name) == "ab12"
    assert secret("WANDB_API_KEY") == "from env"
    for other in ("TPUCARE_RAY_TOKEN_", "TPUCARE_RAY_TOKEN_lab", "TPUCARE_RAY_TOKEN_/../X", f"{name}\n", "../secrets"):
        assert secret(other) is None


def test_a_token_that_another_could_have_placed_is_refused(tmp_path: Path) -> None:
    name = "TPUCARE_RAY_TOKEN_LAB"
    secret = secrets_of({name: "from env"}, tmp_path)
    (tmp_path / "elsewhere").write_text("ab12")
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / name).symlink_to("elsewhere")
    with pytest.raises(ConfigError, match=f"secret {name}: .*symbolic links"):
        secret(name)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("ab12")
    (tmp_path / name).chmod(0o644)
    with pytest.raises(ConfigError, match=f"secret {name}: .*open to other users"):
        secret(name)
    (tmp_path / name).write_bytes(b"\xff")
    (tmp_path / name).chmod(0o600)
    with pytest.raises(ConfigError, match=f"secret {name}: .*is no text") as caught:
        secret(name)
    assert "xff" not in str(caught.value)
