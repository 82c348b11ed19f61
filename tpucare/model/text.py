"""
Text for people: the nearest valid word, counts and lengths, and foreign text made safe for a terminal.

Callers know the valid words. Standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta

SHOWN_CHARACTERS = 60
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def nearest(word: str, choices: Iterable[str], *, at_most: int = 2) -> tuple[str, ...]:
    """The *choices* most similar to *word*, best first; empty when none is similar."""
    known = list(choices)
    # SequenceMatcher is quadratic in the length, and a file from anywhere may hold a word of any length.
    if len(word) > SHOWN_CHARACTERS:
        return ()
    by_folded = {choice.lower().replace("_", "-"): choice for choice in reversed(known)}
    close = difflib.get_close_matches(word.lower().replace("_", "-"), by_folded, n=at_most, cutoff=0.6)
    return tuple(by_folded[match] for match in close)


def hint(word: str, choices: Iterable[str]) -> str:
    """`; nearest: a, b`, the tail of an error line; empty when no choice is similar to *word*."""
    return naming(nearest(word, choices))


def naming(close: Sequence[str]) -> str:
    """`; nearest: a, b` of the words in *close*; empty when there are none."""
    return f"; nearest: {', '.join(close)}" if close else ""


def counted(number: int, noun: str, several: str = "") -> str:
    """`1 node`, `2 nodes`; *several*: an irregular plural."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def worker_range(count: int) -> str:
    """`its workers are 0 to 3`."""
    return f"its workers are 0 to {count - 1}" if count != 1 else "its only worker is 0"


def size_text(count: int) -> str:
    """`412 MB` of a number of bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return counted(count, "byte")


def length(of: timedelta | float) -> str:
    """A length of time (a number: seconds) for people: 4 s, 2 min 17 s, 25 min, 1 h 30 min, 3 d."""
    left = round(of.total_seconds() if isinstance(of, timedelta) else of)
    for place, (unit, size) in enumerate(_UNITS):
        count, left = divmod(left, size)
        if count:
            smaller, its_size = _UNITS[place + 1] if unit != "s" else ("", 1)
            # From ten units on the smaller unit is noise.
            rest = left // its_size if count < 10 else 0
            return f"{count} {unit}" + (f" {rest} {smaller}" if rest else "")
    return "0 s"


def shown(value: object) -> str:
    """*value* on one line, shortened, without control characters that a hostile file could send to the terminal."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > SHOWN_CHARACTERS:
        text = text[: SHOWN_CHARACTERS - 1] + "…"
    printable = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return printable or "''"


# --- foreign text, made safe for a terminal --------------------------------------------------------------------------


# ECMA-48: CSI and the string sequences with their terminators, then every other escape.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?")


def plain(text: str) -> str:
    """*text* on one line."""
    return " ".join(plain_lines(text).split("\n")).replace("\t", " ").strip()


def plain_lines(text: str) -> str:
    """*text* with its lines and tabs, without escape sequences, controls and other unprintable characters."""
    text = _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _instead(char) for char in text)


def _instead(char: str) -> str:
    """A space for Unicode spaces and line breaks, nothing for other characters."""
    return " " if char >= "\xa0" and char.isspace() else ""
