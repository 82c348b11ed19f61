"""How objects, buckets and refusals look in Cloud Storage's JSON API, and what requests say in it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from tpucare.testbed.emulator.http_server import HttpAnswer, HttpRequest
from tpucare.testbed.emulator.storage.objects import Conditions, ObjectError, StoredObject


def object_of(body: bytes) -> dict[str, Any]:
    value = json.loads(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise ObjectError(400, "parseError", "Parse Error")
    return value


def conditions_of(request: HttpRequest, prefix: str = "if") -> Conditions:
    def number(name: str) -> int | None:
        text = request.value(prefix + name)
        return int(text) if text else None

    return Conditions(
        number("GenerationMatch"),
        number("GenerationNotMatch"),
        number("MetagenerationMatch"),
        number("MetagenerationNotMatch"),
    )


def media(found: StoredObject, wanted: str) -> HttpAnswer:
    """The content, or the range that was asked for."""
    size, content = len(found.content), found.content
    headers = {
        "ETag": found.etag,
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": str(found.metageneration),
        "x-goog-hash": f"md5={found.md5}",
        "x-goog-stored-content-length": str(size),
        "x-goog-stored-content-encoding": "identity",
    }
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted.strip())
    if match is None or not (match[1] or match[2]):
        return HttpAnswer(200, content, found.content_type, headers)
    first = int(match[1]) if match[1] else max(0, size - int(match[2]))
    last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
    if first >= size or first > last:
        return HttpAnswer(416, b"", found.content_type, {"Content-Range": f"bytes */{size}"})
    span = {"Content-Range": f"bytes {first}-{last}/{size}"}
    return HttpAnswer(206, content[first : last + 1], found.content_type, headers | span)


def object_json(one: StoredObject, request: HttpRequest) -> dict[str, Any]:
    here = f"http://{request.headers.get('host', '127.0.0.1')}"
    path = f"/storage/v1/b/{quote(one.bucket, safe='')}/o/{quote(one.name, safe='')}"
    said: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{one.bucket}/{one.name}/{one.generation}",
        "selfLink": here + path,
        "mediaLink": f"{here}/download{path}?generation={one.generation}&alt=media",
        "name": one.name,
        "bucket": one.bucket,
        "generation": str(one.generation),
        "metageneration": str(one.metageneration),
        "contentType": one.content_type,
        "storageClass": "STANDARD",
        "size": str(len(one.content)),
        "etag": one.etag,
        "timeCreated": _stamp(one.created),
        "updated": _stamp(one.updated),
    }
    if one.metadata:
        said["metadata"] = dict(one.metadata)
    if one.components:
        said["componentCount"] = one.components
    else:
        said["md5Hash"] = one.md5  # composed objects have none
    if (checksum := _crc32c(one.content)) is not None:
        said["crc32c"] = checksum
    return said


def _crc32c(content: bytes) -> str | None:
    """Clients that check it bring the library; without it nobody here can tell."""
    try:
        import google_crc32c
    except ImportError:
        return None
    return base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()


def bucket_json(name: str, made: datetime) -> dict[str, Any]:
    return {
        "kind": "storage#bucket",
        "id": name,
        "name": name,
        "projectNumber": "0",
        "metageneration": "1",
        "location": "US",
        "locationType": "multi-region",
        "storageClass": "STANDARD",
        "timeCreated": _stamp(made),
        "updated": _stamp(made),
    }


def _stamp(instant: datetime) -> str:
    return instant.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def said_json(values: Mapping[str, Any]) -> HttpAnswer:
    return HttpAnswer(200, json.dumps(values).encode())


def refused(error: ObjectError) -> HttpAnswer:
    if error.code == 304:
        return HttpAnswer(304)
    detail = {"message": error.message, "domain": "global", "reason": error.reason}
    said = {"error": {"code": error.code, "message": error.message, "errors": [detail]}}
    return HttpAnswer(error.code, json.dumps(said).encode())
