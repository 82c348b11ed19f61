"""
Shared by all commands: options of the whole program, exit codes, questions, and the one place that turns errors into a
line on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
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


class CommandError(errors.TpuCareError):
    """A command refuses its arguments or cannot go on; the text says why."""


class NotConfirmed(CommandError):
    """The command would delete something, and no person confirmed it."""


# Subclasses before their base: the first match counts.
_CODES: tuple[tuple[type[BaseException], Exit], ...] = (
    (errors.ConfigError, Exit.CONFIG),
    (errors.StoreLocked, Exit.DAEMON),
    (control.NoDaemon, Exit.DAEMON),
    (control.Suspended, Exit.DAEMON),
    (errors.StoreError, Exit.STORE),
    (errors.CloudError, Exit.CLOUD),
    (errors.RemoteError, Exit.REMOTE),
    (errors.TpuCareError, Exit.FAILED),
    # A full disk, or a path that is not a folder: the system's message, which names the file.
    (OSError, Exit.FAILED),
)


class Globals:
    """Flags of the whole program, resolved when a command needs them."""

    def __init__(self, state: str = "", endpoint: str = "", project: str = "", emulator: str = "") -> None:
        self.state, self.endpoint, self.project, self.emulator = state, endpoint, project, emulator

    def options(self) -> Options:
        """Raises: ConfigError."""
        return resolve(
            os.environ, state=self.state, endpoint=self.endpoint, project=self.project, emulator=self.emulator
        )


def options(context: typer.Context, target: str = "") -> Options:
    """`target`: a fleet or slot; the options then name the store that has it, maybe that of a script."""
    chosen = (context.find_object(Globals) or Globals()).options()
    if not target:
        return chosen
    from tpucare.service.stores import Stores

    return Stores(chosen).options_for(target)


def emulator_folder(context: typer.Context) -> Path:
    """Folder of the emulator: --emulator, TPUCARE_EMULATOR, else `emulator` in the state folder."""
    found = context.find_object(Globals) or Globals()
    named = found.emulator or os.environ.get("TPUCARE_EMULATOR", "")
    if named:
        return expanded(named)
    env = {key: value for key, value in os.environ.items() if key not in ("TPUCARE_EMULATOR", "TPUCARE_ENDPOINT")}
    return resolve(env, state=found.state).state / "emulator"


# --- output ----------------------------------------------------------------------------------------------------------


def say(text: str = "") -> None:
    """Print text for a person, without control sequences of terminals."""
    typer.echo(plain_lines(text))


def warn(text: str) -> None:
    typer.echo(plain(text), err=True)


def print_json(value: Any) -> None:
    """One JSON value, indented for a terminal and on one line for a pipe."""
    typer.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def ask(question: str, *, yes: bool) -> None:
    """
    Return only if a person says yes.

    Raises: NotConfirmed: the answer is no, or there is no terminal and no --yes.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NotConfirmed(f"{plain(question)} There is no terminal to ask on; pass --yes to confirm")
    if not typer.confirm(plain(question), err=True):
        raise NotConfirmed("not confirmed; nothing was done")


# --- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn every error into lines on stderr and an exit code."""
    _fill_streams()
    try:
        yield
    except SystemExit as left:
        # Click exits with an error code after a broken pipe.
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
        # A mistyped command line. Its class comes from one of two clicks, depending on typer's version.
        if (show := getattr(error, "show", None)) and isinstance(code := getattr(error, "exit_code", None), int):
            show()
            leave(code)
        try:
            _show(error)
        except OSError:
            # On a full disk the line cannot be written either: then only the exit code reports the error, and flushing
            # would change it.
            os._exit(int(exit_code(error)))
        leave(exit_code(error))


def _fill_streams() -> None:
    """Open /dev/null for a closed stdin, stdout or stderr: otherwise the next opened file would get its number."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _drop_output() -> None:
    """Redirect stdout to /dev/null: its reader is gone, and a flush at exit would fail."""
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


def bounds_line(fleet: str, cost: Mapping[str, Any]) -> str:
    """What a fleet has cost, and when it ends; empty where its file has no such bound."""
    parts = []
    if cost["max_cost"] is not None:
        spent = f"{cost['dollars']:.2f} of {cost['max_cost']:.10g} dollars spent"
        parts.append(f"{spent}, {cost['dollars_per_hour']:.4g} an hour")
    if cost["until"] is not None:
        parts.append(f"ends {datetime.fromisoformat(cost['until']).astimezone():%Y-%m-%d %H:%M %Z}")
    return f"{fleet}: {'; '.join(parts)}" if parts else ""


def work_line(slot: str, work: Mapping[str, Any]) -> str:
    """How far the work of a slot is, beside the line of its deadline."""
    ahead = work["hours"] - work["hours_due"]
    where = f"{abs(ahead):.1f} h {'ahead of' if ahead >= 0 else 'behind'} the line"
    by = datetime.fromisoformat(work["by"]).astimezone()
    return f"{slot}: {work['hours']:.1f} of {work['hours_of_work']:.10g} h of work, {where}, due {by:%Y-%m-%d %H:%M %Z}"
