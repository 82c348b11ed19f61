"""
Finds the example folders for the demo and `tpucare init`.

They belong to the source tree (`examples/`), and the wheel has them as `tpucare/_examples/`.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


def example_folder(name: str) -> Path:
    """
    The folder of the example *name*, for instance ``train``.

    Raises:
        FileNotFoundError: neither the installed package nor a source checkout around it has that example.
    """
    installed, checkout = _PACKAGE / "_examples" / name, _PACKAGE.parent / "examples" / name
    for folder in (installed, checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"example {name!r} is neither at {installed} nor at {checkout}")
