"""
The CLI: arguments -> one call -> text, JSON or a live view.

A command module imports only typer and the standard library at its top; heavy modules are imported where they are
used, so that `tpucare --help` and a mistyped command are fast.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of `tpucare`: never returns; shows a traceback only with TPUCARE_DEBUG=1."""
    from tpucare.cli.app import app
    from tpucare.cli.common import Exit, leave, reported

    with reported():
        code = app(prog_name="tpucare", standalone_mode=False)
        leave(code if isinstance(code, int) else Exit.OK)
