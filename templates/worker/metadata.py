"""
Watches the VM's metadata server for `instance/preempted` and `instance/maintenance-event`.

Both are long polls, each on its own thread. Without such a server the watch asks again every minute.
Standard library only, Python 3.8 and newer: this runs on the TPU VM.
Source: Compute Engine documentation, "Query VM metadata" (wait_for_change, last_etag, timeout_sec).
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable

WAIT_SECONDS = 60
RETRY_SECONDS = 5.0
RETRY_LIMIT_SECONDS = 60.0


def watch(entry: str, changed: Callable[[str, str], None]) -> None:
    """Call ``changed(entry, value)`` on another thread with the first value of *entry* and each new one."""
    threading.Thread(target=_watch, args=(entry, changed), daemon=True).start()


def _watch(entry: str, changed: Callable[[str, str], None]) -> None:
    last, etag, pause = "", "", RETRY_SECONDS
    while True:
        asked_at = time.monotonic()
        try:
            value, etag = _ask(entry, etag)
        except (OSError, http.client.HTTPException, ValueError):
            etag = ""
            time.sleep(pause)
            pause = min(pause * 2, RETRY_LIMIT_SECONDS)
            continue
        pause = RETRY_SECONDS
        if value != last:
            last = value
            changed(entry, value)
        elif time.monotonic() - asked_at < 1:
            # A server that does not wait for a change answers at once: without a pause the watch would use a core.
            time.sleep(RETRY_SECONDS)


def _ask(entry: str, etag: str) -> tuple[str, str]:
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    path = f"/computeMetadata/v1/instance/{entry}"
    if etag:
        path += f"?wait_for_change=true&timeout_sec={WAIT_SECONDS}&last_etag={etag}"
    # A silent server must not block the watch longer than the length of a poll.
    connection = http.client.HTTPConnection(host, timeout=WAIT_SECONDS + 15 if etag else 5)
    try:
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        body = answer.read(4096).decode(errors="replace").strip()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        return body, answer.headers.get("ETag", "")
    finally:
        connection.close()
