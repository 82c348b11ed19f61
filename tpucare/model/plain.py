"""
Text from elsewhere (a worker, a label, an API, a file) in a form that no terminal obeys. Standard library only.
"""

from __future__ import annotations

import re

# ECMA-48: CSI and the string sequences with their terminators, then every other escape.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?")


def plain(text: str) -> str:
    """*text* on one line."""
    return " ".join(plain_lines(text).split("\n")).replace("\t", " ").strip()


def plain_lines(text: str) -> str:
    """*text* with its lines and tabs, without sequences, controls and whatever else nobody can read."""
    text = _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _instead(char) for char in text)


def _instead(char: str) -> str:
    """A space for the wide, narrow and line-breaking ones of Unicode, nothing for all else."""
    return " " if char >= "\xa0" and char.isspace() else ""
