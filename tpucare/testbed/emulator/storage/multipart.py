"""Bodies of several parts: a multipart upload, and the calls of a batch."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import parse_qsl

from tpucare.testbed.emulator.http_server import HttpRequest
from tpucare.testbed.emulator.storage.objects import ObjectError


def inner_request(outer: HttpRequest, content: bytes) -> HttpRequest:
    """One call of a batch: an HTTP request as text."""
    head, _, body = content.replace(b"\r\n", b"\n").lstrip(b"\n").partition(b"\n\n")
    line, *lines = head.decode().split("\n")
    method, target = line.split(" ")[:2]
    path, _, query = re.sub(r"^https?://[^/]+", "", target).partition("?")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return replace(
        outer,
        method=method,
        path=path,
        query=tuple(parse_qsl(query, keep_blank_values=True)),
        headers=headers,
        body=body,
    )


def parts_of(request: HttpRequest) -> list[tuple[dict[str, str], bytes]]:
    """Headers and content of every part of a multipart body. Raises: ObjectError (400)."""
    match = re.search(r"boundary=\"?([^\";]+)", request.headers.get("content-type", ""))
    if match is None:
        raise ObjectError(400, "badContent", "The body has no boundary.")
    found = []
    for raw in (b"\r\n" + request.body).split(b"\r\n--" + match[1].encode())[1:]:
        if raw.startswith(b"--"):
            break
        head, gap, content = raw.partition(b"\r\n\r\n")
        if not gap:
            raise ObjectError(400, "badContent", "A part of the body has no end of headers.")
        lines = (line.partition(":") for line in head.decode("latin-1").strip().split("\r\n"))
        found.append(({name.strip().lower(): value.strip() for name, _, value in lines}, content))
    return found
