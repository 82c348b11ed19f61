"""
Writes every event as one line on stderr, for people or as JSON for machines; the engine decides which events there are.

A text may come from a worker, a label or the API, so control characters are taken out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from datetime import datetime
from enum import StrEnum
from typing import Any, TextIO

import structlog

from tpucare.model.actions import event_line
from tpucare.model.resources import Event
from tpucare.model.text import plain

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LogForm(StrEnum):
    """console: a line for people    json: one object a line"""

    CONSOLE = "console"
    JSON = "json"


def configure(form: LogForm, level: str = "info", stream: TextIO | None = None) -> None:
    """Set the form and the lowest level. Once per process, before the first line."""
    out = stream or sys.stderr
    logging.getLogger().setLevel(logging.WARNING)
    last: Any = structlog.processors.JSONRenderer(default=str) if form is LogForm.JSON else _line_for_people
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            structlog.processors.format_exc_info,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS.get(level, logging.INFO)),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )


def _line_for_people(_: object, __: str, said: MutableMapping[str, Any]) -> str:
    """Local time, slot and text, and those fields whose values the text does not contain."""
    text, trace = str(said.pop("event", "")), said.pop("exception", "")
    at, level = datetime.fromisoformat(said.pop("at")).astimezone(), said.pop("level", "info")
    slot = said.pop("slot", "")
    more = [f"{key}={value}" for key, value in said.items() if key != "kind" and _is_news(value, text)]
    line = event_line(at, level, slot, " ".join([text, *more]))
    return f"{line}\n{trace}" if trace else line


def _is_news(value: object, text: str) -> bool:
    return value not in (None, "") and str(value) not in text


def teller() -> Callable[[Event], None]:
    """The listener of the engine that writes a line per event; a log that cannot be written stops no slot's care."""
    log = structlog.get_logger("tpucare")

    def tell(event: Event) -> None:
        fields: dict[str, Any] = {"kind": event.kind}
        if event.slot:
            fields["slot"] = event.slot
        if event.node:
            fields["node"] = event.node
        fields |= {key: value for key, value in event.fields.items() if key not in ("event", "level", "at")}
        cleaned = {key: plain(value) if isinstance(value, str) else value for key, value in fields.items()}
        try:
            log.log(_LEVELS.get(event.level, logging.INFO), plain(event.text), **cleaned)
        except (OSError, ValueError):
            return

    return tell
