"""
`exec_command`: the text of a script that prepares a worker with a repository and starts the run.

Pure but for reading WANDB_BASE_URL. Every value is quoted for the shell that reads it, and a W&B key is never in the
text: it is a field of the returned `Command`, and `hosts.send_to_tpu` writes it beside the script. The steps of the
script and its exit statuses are in `templates/shell/exec_command.sh.j2`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any
from urllib.parse import urlsplit

from tpucare.adapters.runner import scripts
from tpucare.model.errors import ConfigError
from tpucare.model.text import shown

WANDB_MACHINE = "api.wandb.ai"
KEY_LENGTH = 40
# The name of the key's file, in the login user's home, for a text that is run without being a file there.
NAMELESS = ".tpucare-command"
NETRC_SUFFIX = ".netrc"

_KEY = re.compile(r"[A-Za-z0-9._-]+")
_MACHINE = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_FOLDER = re.compile(r"[^./:][^/:]*")
# pgrep reads extended regular expressions; users give plain names.
_SPECIAL = re.compile(r"([\\.^$*+?()\[\]{}|])")


class ScriptStatus(IntEnum):
    """Exit statuses of the script, beside 0 and that of a failed setup command."""

    PROGRAMS = 80
    MISSING = 81
    FETCH = 82
    KEY = 83
    SCREEN = 84


class Command(str):
    """
    The text of a script, and the secret that is delivered beside it and never in it.

    Text added with `+` keeps the secret; any other change, and pickling, gives plain text, and the script then fails on
    the worker because its key is missing.
    """

    __slots__ = ("_netrc",)
    _netrc: str

    def __new__(cls, text: str, netrc: str = "") -> Command:
        command = super().__new__(cls, text)
        command._netrc = netrc
        return command

    @property
    def netrc(self) -> str:
        """Content of the netrc file that the script expects beside it, a secret; empty when it needs none."""
        return self._netrc

    def __add__(self, text: str) -> Command:
        return Command(str.__add__(self, text), self._netrc)

    def __radd__(self, text: str) -> Command:
        return Command(str.__add__(text, self), self._netrc)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __copy__(self) -> Command:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Command:
        return self


def exec_command(
    repository: str,
    wandb_key: str | None = None,
    branch: str = "main",
    setup_command: str = "(bash setup.sh; exit 0)",
    run_command: str = "bash run.sh",
    install_python: bool = True,
    pkilled: str | Iterable[str] | None = None,
) -> Command:
    """
    A bash script that brings *repository* to `~/<its name>`, sets it up and starts the run in a screen named `model`.

    It installs git and screen (and, with *install_python*, Python and pip) where they are missing, ends this user's
    processes whose command line contains one of *pkilled*, clones one commit of *branch* (or tag), logs in to W&B when
    a key is given, runs *setup_command* in the clone, and starts *run_command* there, detached: it survives the end of
    the SSH session, and cron starts it again after a reboot. What *setup_command* exports, the run sees. Executed
    again while the run is live, it changes nothing.

    Give the result unchanged to `send_to_tpu` or `exec_on_tpu`, which deliver the key beside it. If you bring it to the
    worker in another way, set WANDB_API_KEY there, or log in; otherwise the script fails. The W&B service is that of
    WANDB_BASE_URL.
    Raises: ConfigError: a value that no worker could use, or a secret in a place where it would be seen.
    """
    base_url = os.environ.get("WANDB_BASE_URL", "").strip() if wandb_key is not None else ""
    return build(
        repository, wandb_key, branch, setup_command, run_command, install_python, _names(pkilled), base_url=base_url
    )


def build(
    repository: str,
    wandb_key: str | None,
    branch: str,
    setup_command: str,
    run_command: str,
    install_python: bool,
    pkilled: tuple[str, ...],
    *,
    base_url: str = "",
) -> Command:
    """As `exec_command`, without defaults. *base_url*: of the W&B service; empty: that of the installed wandb."""
    folder = _folder_of(repository)
    for name, text in (("branch", branch), ("setup_command", setup_command), ("run_command", run_command)):
        _check_text(name, text)
    machine = _machine_of(base_url) if wandb_key is not None else ""
    netrc = f"machine {machine}\n  login user\n  password {_checked_key(wandb_key)}\n" if wandb_key is not None else ""
    text = scripts.render(
        "exec_command.sh.j2",
        status={status.name.lower(): int(status) for status in ScriptStatus},
        repository=repository,
        branch=branch,
        folder=folder,
        setup_command=setup_command,
        install_python=bool(install_python),
        pkilled=[_SPECIAL.sub(r"\\\1", name) for name in pkilled],
        machine=machine,
        base_url=base_url,
        nameless=NAMELESS,
        model=scripts.render("exec_model.sh.j2", folder=folder, run_command=run_command),
    )
    return Command(text, netrc)


def _folder_of(repository: str) -> str:
    """The folder name that `git clone` would choose; scripts of users rely on it."""
    _check_text("repository", repository)
    if any(ord(char) < 32 for char in repository) or repository.startswith("-"):
        raise ConfigError(f"repository {shown(repository)} is not a URL or path that git can clone")
    if scripts.holds_credentials(repository):
        raise ConfigError("repository holds credentials, which would be in the script and in logs: use a URL without")
    folder = re.split(r"[/:]", repository.rstrip("/").removesuffix("/.git").rstrip("/"))[-1].removesuffix(".git")
    if not _FOLDER.fullmatch(folder):
        raise ConfigError(f"repository {shown(repository)} does not end in a name that a folder could have")
    return folder


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name} must be a text that is not empty, not {shown(text)}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} holds half a character, which no file can hold") from error
    if "\0" in text or size > scripts.SCRIPT_LIMIT:
        raise ConfigError(f"{name} has more than {scripts.SCRIPT_LIMIT >> 10} KiB, or a NUL; put it into a file")


def _names(pkilled: str | Iterable[str] | None) -> tuple[str, ...]:
    names = (pkilled,) if isinstance(pkilled, str) else tuple(pkilled or ())
    for name in names:
        _check_text("pkilled", name)
    return names


def _checked_key(key: str) -> str:
    """The key itself is in no message: errors end up in logs."""
    text = key.strip() if isinstance(key, str) else ""
    if len(text) < KEY_LENGTH:
        raise ConfigError(f"wandb_key has {len(text)} characters; a W&B API key has {KEY_LENGTH} or more")
    if not _KEY.fullmatch(text):
        raise ConfigError("wandb_key holds a character that no W&B API key has: letters, digits, '-', '_' and '.' only")
    return text


def _machine_of(base_url: str) -> str:
    """The machine of a W&B key in a netrc file: the host, with the port where the URL names one."""
    if not base_url:
        return WANDB_MACHINE
    try:
        parts = urlsplit(base_url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not _MACHINE.fullmatch(parts.netloc):
        raise ConfigError("WANDB_BASE_URL is not of the form https://host or https://host:port, without credentials")
    return parts.netloc
