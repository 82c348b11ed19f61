"""
Text from elsewhere (a worker, a label, an API, a file) in a form that no terminal obeys. Standard library only.
"""

from __future__ import annotations

import re

# ECMA-48: CSI and the string sequences with their terminators, then every other escape.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """*text* on one line."""
    return " ".join(plain_lines(text).split("\n")).replace("\t", " ").strip()


def plain_lines(text: str) -> str:
    """*text* with its lines and tabs, without sequences, controls and marks that reorder what is read."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
