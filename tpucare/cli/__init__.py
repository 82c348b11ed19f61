"""
The command line: arguments -> one call -> text, JSON or a live view.

A command module imports typer and the standard library only; whatever is heavy is imported where it is used, so that
`tpucare --help` and a mistyped command cost next to nothing.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of `tpucare`: never returns, and never shows a traceback (TPUCARE_DEBUG=1 does)."""
    from tpucare.cli.app import app
    from tpucare.cli.common import Exit, leave, reported

    with reported():
        code = app(prog_name="tpucare", standalone_mode=False)
        leave(code if isinstance(code, int) else Exit.OK)


__all__ = ["main"]
