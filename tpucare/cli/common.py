"""
What commands have in common: options of the whole program, exit codes, questions, and the one place where errors
become a line on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import typer

from tpucare.model import errors
from tpucare.model.text import plain, plain_lines
from tpucare.service import control_socket as control
from tpucare.service.options import Options, expanded, resolve


class Exit(IntEnum):
    """Documented in docs/cli.md; scripts may rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 3
    DAEMON = 4
    STORE = 5
    CLOUD = 6
    REMOTE = 7
    BUG = 70
    INTERRUPTED = 130


class Failure(errors.TpuCareError):
    """A command cannot do what was asked; the text says why."""


class NotConfirmed(Failure):
    """Something would be destroyed, and nobody said yes."""


# From the narrow to the wide: the first that fits counts.
_CODES: tuple[tuple[type[BaseException], Exit], ...] = (
    (errors.ConfigError, Exit.CONFIG),
    (errors.StoreLocked, Exit.DAEMON),
    (control.NoDaemon, Exit.DAEMON),
    (errors.StoreError, Exit.STORE),
    (errors.CloudError, Exit.CLOUD),
    (errors.RemoteError, Exit.REMOTE),
    (errors.TpuCareError, Exit.FAILED),
    # A full disk, or a path that is no folder: the machine's answer, which names the file.
    (OSError, Exit.FAILED),
)


class Globals:
    """Flags before the command, resolved when a command first asks."""

    def __init__(self, state: str = "", endpoint: str = "", project: str = "", emulator: str = "") -> None:
        self.state, self.endpoint, self.project, self.emulator = state, endpoint, project, emulator

    def options(self) -> Options:
        """Raises: ConfigError."""
        return resolve(
            os.environ, state=self.state, endpoint=self.endpoint, project=self.project, emulator=self.emulator
        )


def options(context: typer.Context, target: str = "") -> Options:
    """`target`: a fleet or slot; what is known to the store of a script alone is looked for there."""
    found = context.find_object(Globals)
    chosen = (found or Globals()).options()
    if not target:
        return chosen
    from tpucare.service.stores import Stores

    return Stores(chosen).options_for(target)


def emulator_folder(context: typer.Context) -> Path:
    """Where an emulator lies or will lie: --emulator, TPUCARE_EMULATOR, else `emulator` in the state folder."""
    found = context.find_object(Globals) or Globals()
    named = found.emulator or os.environ.get("TPUCARE_EMULATOR", "")
    if named:
        return expanded(named)
    env = {key: value for key, value in os.environ.items() if key not in ("TPUCARE_EMULATOR", "TPUCARE_ENDPOINT")}
    return resolve(env, state=found.state).state / "emulator"


# --- text out --------------------------------------------------------------------------------------------------------


def say(text: str = "") -> None:
    """Text for a person, of which nothing drives the terminal."""
    typer.echo(plain_lines(text))


def warn(text: str) -> None:
    typer.echo(plain(text), err=True)


def print_json(value: Any) -> None:
    """One JSON value, indented for a terminal and on one line for a pipe."""
    typer.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def ask(question: str, *, yes: bool) -> None:
    """
    Go on only when a person says yes.

    Raises: NotConfirmed: they did not, or there is nobody to ask and no --yes.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NotConfirmed(f"{plain(question)} This is no terminal to ask at; pass --yes to confirm")
    if not typer.confirm(plain(question), err=True):
        raise NotConfirmed("nothing was done")


# --- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """The one place where an error becomes a line on stderr and an exit code."""
    _fill_streams()
    try:
        yield
    except SystemExit as left:
        # Click has taken the broken pipe for a failure by then.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        _drop_output()
        leave(Exit.OK)
    except KeyboardInterrupt:
        leave(Exit.INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        leave(Exit.OK)
    except typer.Abort:
        leave(Exit.INTERRUPTED)
    except Exception as error:
        # A mistyped command line. Which click its class comes from depends on the version of typer.
        if (show := getattr(error, "show", None)) and isinstance(code := getattr(error, "exit_code", None), int):
            show()
            leave(code)
        try:
            _show(error)
        except OSError:
            # On a full disk the line may not be written either: then the code alone has to tell, and flushing would
            # only change it.
            os._exit(int(exit_code(error)))
        leave(exit_code(error))


def _fill_streams() -> None:
    """Where stdin, stdout or stderr is closed, /dev/null: else the next file that is opened would take its number."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _drop_output() -> None:
    """Whoever read our output has what it wanted; stdout must not be flushed into nothing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def exit_code(error: BaseException) -> Exit:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return Exit.BUG


def _show(error: Exception) -> None:
    if os.environ.get("TPUCARE_DEBUG"):
        import traceback

        traceback.print_exception(error)
        return
    lines = [line for line in plain_lines(_text_of(error)).splitlines() if line.strip()]
    if exit_code(error) is Exit.BUG:
        lines = [f"unexpected {type(error).__name__}: {' '.join(lines)} (TPUCARE_DEBUG=1 shows where)"]
    for line in lines or [type(error).__name__]:
        typer.echo(f"tpucare: {line}" if len(lines) < 2 else line, err=True)


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def leave(code: int) -> NoReturn:
    raise SystemExit(int(code))
