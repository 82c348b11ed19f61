"""
Cloud Storage's JSON API over an `ObjectStore`, as far as tensorstore, gcsfs, google-cloud-storage and gsutil use it:
buckets; objects with media, multipart and resumable uploads, ranges, copies, compositions; and batches.

STORAGE_EMULATOR_HOST and TENSORSTORE_GCS_HTTP_URL direct clients here. Credentials are not checked. `fields`,
`projection`, versions, ACLs and encryption keys have no effect.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from tpucare.testbed.emulator.http_server import HttpAnswer, HttpRequest, HttpService
from tpucare.testbed.emulator.storage.objects import Conditions, ObjectError, ObjectQuery, ObjectStore, StoredObject


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
    """The content, or the requested range of it."""
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
    body: dict[str, Any] = {
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
        body["metadata"] = dict(one.metadata)
    if one.components:
        body["componentCount"] = one.components
    else:
        body["md5Hash"] = one.md5  # composed objects have none
    if (checksum := _crc32c(one.content)) is not None:
        body["crc32c"] = checksum
    return body


def _crc32c(content: bytes) -> str | None:
    """The checksum, if the library is installed; clients that check it depend on the library."""
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


def json_answer(values: Mapping[str, Any]) -> HttpAnswer:
    return HttpAnswer(200, json.dumps(values).encode())


def error_answer(error: ObjectError) -> HttpAnswer:
    if error.code == 304:
        return HttpAnswer(304)
    detail = {"message": error.message, "domain": "global", "reason": error.reason}
    body = {"error": {"code": error.code, "message": error.message, "errors": [detail]}}
    return HttpAnswer(error.code, json.dumps(body).encode())


# --- bodies of several parts: a multipart upload, and the calls of a batch --------------------------------------------


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


# --- the calls --------------------------------------------------------------------------------------------------------


PAGE_LIMIT = 1000
BATCH_LIMIT = 100
STILL_OPEN = 308
"""`Resume Incomplete`: the status of a resumable upload until its last byte has arrived."""


@dataclass(eq=False)
class _Upload:
    """An unfinished resumable upload."""

    bucket: str
    name: str
    content_type: str
    metadata: Mapping[str, str]
    conditions: Conditions
    content: bytearray = field(default_factory=bytearray)


class ObjectServer:
    """Answers HTTP requests from a store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._uploads: dict[str, _Upload] = {}
        bucket, thing = r"/b/([^/]+)", r"/o/([^/]+)"
        api, upload = r"(?:/download)?/storage/v1", r"/upload/storage/v1"
        self._rules: list[tuple[str, re.Pattern[str], Callable[..., HttpAnswer]]] = [
            (verb, re.compile(pattern + "/?"), act)
            for verb, pattern, act in (
                ("GET", f"{api}/b", self._list_buckets),
                ("POST", f"{api}/b", self._make_bucket),
                ("GET", f"{api}{bucket}", self._get_bucket),
                ("DELETE", f"{api}{bucket}", self._delete_bucket),
                ("GET", f"{api}{bucket}/storageLayout", self._layout),
                ("GET", f"{api}{bucket}/o", self._list),
                ("GET", f"{api}{bucket}{thing}", self._get),
                ("DELETE", f"{api}{bucket}{thing}", self._delete),
                ("PATCH", f"{api}{bucket}{thing}", self._patch),
                ("PUT", f"{api}{bucket}{thing}", self._patch),
                ("POST", f"{api}{bucket}{thing}/rewriteTo{bucket}{thing}", self._rewrite),
                ("POST", f"{api}{bucket}{thing}/copyTo{bucket}{thing}", self._copy),
                ("POST", f"{api}{bucket}{thing}/moveTo{thing}", self._move),
                ("POST", f"{api}{bucket}{thing}/compose", self._compose),
                ("POST", f"{upload}{bucket}/o", self._upload),
                ("PUT", f"{upload}{bucket}/o", self._continue),
                ("DELETE", f"{upload}{bucket}/o", self._cancel),
                ("POST", "/batch(?:/storage/v1)?", self._batch),
            )
        ]

    def serve(self, port: int = 0) -> HttpService:
        """Raises: ConfigError: the port is taken."""
        return HttpService(self.answer, port)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        for verb, pattern, act in self._rules:
            if verb == request.method and (match := pattern.fullmatch(request.path)):
                try:
                    return act(request, *map(unquote, match.groups()))
                except ObjectError as error:
                    return error_answer(error)
                except ValueError as error:
                    return error_answer(ObjectError(400, "invalid", f"Invalid argument: {error}"))
        return error_answer(ObjectError(404, "notFound", f"Not Found: {request.method} {request.path}"))

    # --- buckets

    def _list_buckets(self, _request: HttpRequest) -> HttpAnswer:
        items = [bucket_json(name, made) for name, made in self._store.buckets().items()]
        return json_answer({"kind": "storage#buckets", "items": items})

    def _make_bucket(self, request: HttpRequest) -> HttpAnswer:
        name = str(object_of(request.body).get("name", ""))
        return json_answer(bucket_json(name, self._store.make_bucket(name)))

    def _get_bucket(self, _request: HttpRequest, bucket: str) -> HttpAnswer:
        return json_answer(bucket_json(bucket, self._store.bucket(bucket)))

    def _delete_bucket(self, _request: HttpRequest, bucket: str) -> HttpAnswer:
        self._store.delete_bucket(bucket)
        return HttpAnswer(204)

    def _layout(self, _request: HttpRequest, bucket: str) -> HttpAnswer:
        self._store.bucket(bucket)
        flat = {"hierarchicalNamespace": {"enabled": False}, "location": "US", "locationType": "multi-region"}
        return json_answer({"kind": "storage#storageLayout", "bucket": bucket, **flat})

    # --- objects

    def _list(self, request: HttpRequest, bucket: str) -> HttpAnswer:
        size = int(request.value("maxResults") or PAGE_LIMIT)
        asked = ObjectQuery(
            prefix=request.value("prefix"),
            delimiter=request.value("delimiter"),
            start=request.value("startOffset"),
            end=request.value("endOffset"),
            glob=request.value("matchGlob"),
            trailing=request.value("includeTrailingDelimiter") == "true",
            size=max(1, min(size, PAGE_LIMIT)),
            after=request.value("pageToken"),
        )
        page = self._store.list(bucket, asked)
        body: dict[str, Any] = {"kind": "storage#objects"}
        if page.items:
            body["items"] = [object_json(one, request) for one in page.items]
        if page.prefixes:
            body["prefixes"] = list(page.prefixes)
        if page.next_token:
            body["nextPageToken"] = page.next_token
        return json_answer(body)

    def _get(self, request: HttpRequest, bucket: str, name: str) -> HttpAnswer:
        wanted = request.value("generation")
        found = self._store.get(
            bucket, name, generation=int(wanted) if wanted else None, conditions=conditions_of(request)
        )
        if request.value("alt") == "media" or request.path.startswith("/download/"):
            return media(found, request.headers.get("range", ""))
        return json_answer(object_json(found, request))

    def _delete(self, request: HttpRequest, bucket: str, name: str) -> HttpAnswer:
        wanted = request.value("generation")
        generation = int(wanted) if wanted else None
        self._store.delete(bucket, name, generation=generation, conditions=conditions_of(request))
        return HttpAnswer(204)

    def _patch(self, request: HttpRequest, bucket: str, name: str) -> HttpAnswer:
        changes = object_of(request.body)
        return json_answer(
            object_json(self._store.patch(bucket, name, changes, conditions=conditions_of(request)), request)
        )

    def _copied(self, request: HttpRequest, *names: str) -> StoredObject:
        bucket, name, to_bucket, to_name = names
        return self._store.copy(
            (bucket, name),
            (to_bucket, to_name),
            source_conditions=conditions_of(request, "ifSource"),
            conditions=conditions_of(request),
        )

    def _rewrite(self, request: HttpRequest, *names: str) -> HttpAnswer:
        made = self._copied(request, *names)
        size = str(len(made.content))
        body = {"kind": "storage#rewriteResponse", "totalBytesRewritten": size, "objectSize": size, "done": True}
        return json_answer({**body, "resource": object_json(made, request)})

    def _copy(self, request: HttpRequest, *names: str) -> HttpAnswer:
        return json_answer(object_json(self._copied(request, *names), request))

    def _move(self, request: HttpRequest, bucket: str, name: str, to_name: str) -> HttpAnswer:
        made = self._copied(request, bucket, name, bucket, to_name)
        self._store.delete(bucket, name)
        return json_answer(object_json(made, request))

    def _compose(self, request: HttpRequest, bucket: str, name: str) -> HttpAnswer:
        asked = object_of(request.body)
        sources = [str(one.get("name", "")) for one in asked.get("sourceObjects", ())]
        kind = str(asked.get("destination", {}).get("contentType", ""))
        return json_answer(
            object_json(self._store.compose(bucket, sources, name, kind, conditions_of(request)), request)
        )

    # --- uploads

    def _upload(self, request: HttpRequest, bucket: str) -> HttpAnswer:
        kind = request.value("uploadType")
        if request.value("upload_id"):
            return self._continue(request, bucket)  # as gcsfs sends its chunks
        if kind == "resumable":
            return self._begin(request, bucket)
        described: Mapping[str, Any] = {}
        content, content_type = request.body, request.headers.get("content-type", "")
        if kind == "multipart":
            first, (headers, content) = _two_parts(request)
            described, content_type = object_of(first[1]), headers.get("content-type", "")
        made = self._store.insert(
            bucket,
            str(described.get("name") or request.value("name")),
            content,
            content_type=str(described.get("contentType") or content_type or "application/octet-stream"),
            metadata=described.get("metadata"),
            conditions=conditions_of(request),
        )
        return json_answer(object_json(made, request))

    def _begin(self, request: HttpRequest, bucket: str) -> HttpAnswer:
        self._store.bucket(bucket)
        described = object_of(request.body)
        name = str(described.get("name") or request.value("name"))
        kind = described.get("contentType") or request.headers.get("x-upload-content-type")
        token = uuid.uuid4().hex
        with self._lock:
            self._uploads[token] = _Upload(
                bucket,
                name,
                str(kind or "application/octet-stream"),
                described.get("metadata") or {},
                conditions_of(request),
            )
        host = request.headers.get("host", "127.0.0.1")
        where = f"http://{host}{request.path}?uploadType=resumable&upload_id={token}"
        return HttpAnswer(200, headers={"Location": where, "X-GUploader-UploadID": token})

    def _continue(self, request: HttpRequest, _bucket: str) -> HttpAnswer:
        """A chunk (`bytes 0-99/200`, `bytes 0-99/*`), or a request for the received length (`bytes */200`)."""
        with self._lock:
            upload = self._uploads.get(request.value("upload_id"))
            if upload is None:
                raise ObjectError(404, "notFound", "No such upload")
            span = request.headers.get("content-range", f"bytes 0-{len(request.body) - 1}/{len(request.body)}")
            match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", span)
            if match is None or (match[1] and int(match[1]) > len(upload.content)):
                raise ObjectError(400, "invalid", f"Invalid Content-Range: {span}")
            if match[1]:
                upload.content[int(match[1]) :] = request.body
            if match[3] == "*" or len(upload.content) < int(match[3]):
                have = {"Range": f"bytes=0-{len(upload.content) - 1}"} if upload.content else {}
                return HttpAnswer(STILL_OPEN, headers=have)
            del self._uploads[request.value("upload_id")]
        made = self._store.insert(
            upload.bucket,
            upload.name,
            bytes(upload.content),
            content_type=upload.content_type,
            metadata=upload.metadata,
            conditions=upload.conditions,
        )
        return json_answer(object_json(made, request))

    def _cancel(self, request: HttpRequest, _bucket: str) -> HttpAnswer:
        with self._lock:
            self._uploads.pop(request.value("upload_id"), None)
        return HttpAnswer(499)

    # --- batches

    def _batch(self, request: HttpRequest) -> HttpAnswer:
        # Google's own library ends the lines of the calls without a carriage return.
        lines = request.body.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        parts = parts_of(replace(request, body=lines))
        if len(parts) > BATCH_LIMIT:
            raise ObjectError(400, "invalid", f"A batch holds at most {BATCH_LIMIT} calls.")
        boundary = f"batch_{uuid.uuid4().hex}"
        out = b""
        for headers, content in parts:
            answer = self.answer(inner_request(request, content))
            known = headers.get("content-id", "").strip("<>")
            head = [f"--{boundary}", "Content-Type: application/http"]
            head += [f"Content-ID: <response-{known}>"] if known else []
            head += ["", f"HTTP/1.1 {answer.status} -", f"Content-Type: {answer.content_type}"]
            head += [f"Content-Length: {len(answer.body)}", "", ""]
            out += "\r\n".join(head).encode() + answer.body + b"\r\n"
        return HttpAnswer(200, out + f"--{boundary}--\r\n".encode(), f"multipart/mixed; boundary={boundary}")


def _two_parts(request: HttpRequest) -> list[tuple[dict[str, str], bytes]]:
    parts = parts_of(request)
    if len(parts) != 2:
        raise ObjectError(400, "badContent", "A multipart upload has two parts: metadata and media.")
    return parts
