"""
The newest complete checkpoint in a bucket, where a folder cannot be renamed: orbax puts `commit_success.txt` into the
folder of a complete step; a folder without it is the rest of a killed save.

It asks Cloud Storage's JSON API with the machine's own token, and if that is refused, gcloud or gsutil, which may have
another login. An answer takes long, so the runner asks on a slow schedule, and a probe reads the last answer. Standard
library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import os
import shutil
import threading
import time

import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

PERIOD_SECONDS = 120
ASK_SECONDS = 60
PAGES_LIMIT = 100
# After so many incomplete saves in a row the search ends.
HALF_WRITTEN_LIMIT = 50
COMMITTED = "commit_success.txt"
SERVICE = "https://storage.googleapis.com"
TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"


def watch(bucket: str, answer: str) -> None:
    """Write the newest complete step of *bucket* (`gs://NAME/PATH`) into the file *answer*, every two minutes."""
    threading.Thread(target=_watch, args=(bucket, answer), daemon=True).start()


def _watch(bucket: str, answer: str) -> None:
    written = None
    while True:
        try:
            step = newest(bucket)
        except Exception:
            # Any error (http.client has its own for an incomplete answer): no other thread asks, and its end would go
            # unnoticed.
            step = _newest_by_tool(bucket)
        if step is not None and step != written and files.write_whole(answer, str(step)):
            written = step
        time.sleep(PERIOD_SECONDS)


def newest(bucket: str) -> int | None:
    """
    The newest complete step; None: there is none.

    Raises: OSError, ValueError, http.client.HTTPException: the service refuses us, does not answer, or its answer is
    malformed or incomplete.
    """
    name, _, path = bucket[len("gs://") :].partition("/")
    path = path.strip("/") + "/" if path.strip("/") else ""
    api = StorageApi()
    steps = sorted(set(_steps(api, name, path)), reverse=True)
    return next((step for step in steps[:HALF_WRITTEN_LIMIT] if api.has(name, f"{path}{step}/{COMMITTED}")), None)


def _steps(api: StorageApi, bucket: str, path: str) -> Iterator[int]:
    """Numbers of the folders below *path*, complete or not."""
    token = ""
    for _ in range(PAGES_LIMIT):
        page = api.list(bucket, path, token)
        prefixes = page.get("prefixes", [])
        if not isinstance(prefixes, list):
            raise ValueError("the listing's prefixes are not a list")  # noqa: TRY004  (an answer, not an argument)
        for prefix in prefixes:
            folder = str(prefix)[len(path) :].strip("/")
            # Not `007`: orbax' folder of step 7 is `7`, and `has` asks for that name.
            if folder.isdigit() and folder.isascii() and len(folder) < 19 and str(int(folder)) == folder:
                yield int(folder)
        token = str(page.get("nextPageToken") or "")
        if not token:
            return


class StorageApi:
    """The JSON API of Cloud Storage, as this machine's service account."""

    def __init__(self) -> None:
        import urllib.request

        emulated = os.environ.get("STORAGE_EMULATOR_HOST", "")
        self._base = (emulated if "://" in emulated else f"http://{emulated}") if emulated else SERVICE
        # A proxy from the environment is only for the real service.
        proxies = [urllib.request.ProxyHandler({})] if emulated else []
        self._opener = urllib.request.build_opener(*proxies)
        token = _token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def list(self, bucket: str, prefix: str, token: str) -> dict[str, object]:
        return self._page(bucket, {"prefix": prefix, "delimiter": "/", "fields": "prefixes,nextPageToken"}, token)

    def objects(self, bucket: str, prefix: str) -> dict[str, int]:
        """Sizes of all objects below *prefix*, by name; folders, whose names end with `/`, left out. As `newest`."""
        found: dict[str, int] = {}
        token = ""
        for _ in range(PAGES_LIMIT):
            page = self._page(bucket, {"prefix": prefix, "fields": "items(name,size),nextPageToken"}, token)
            items = [item for item in page.get("items", []) if not item["name"].endswith("/")]
            found.update({str(item["name"]): int(item["size"]) for item in items})
            token = str(page.get("nextPageToken") or "")
            if not token:
                return found
        raise ValueError(f"more than {PAGES_LIMIT} pages of objects")

    def _page(self, bucket: str, query: dict[str, str], token: str) -> dict[str, Any]:
        """One page of a listing: the first, or that of the *token* in the page before it."""
        from urllib.parse import urlencode

        if token:
            query = {**query, "pageToken": token}
        page = self._get(f"/storage/v1/b/{_quoted(bucket)}/o?{urlencode(query)}")
        if not isinstance(page, dict):
            raise ValueError("the listing is not an object")  # noqa: TRY004  (an answer, not an argument)
        return page

    def has(self, bucket: str, name: str) -> bool:
        import urllib.error

        try:
            self._get(f"/storage/v1/b/{_quoted(bucket)}/o/{_quoted(name)}?fields=name")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return False
            raise
        return True

    def open(self, bucket: str, name: str) -> BinaryIO:
        """The content of an object. Raises: OSError (an HTTPError is one): it is not there, or we are refused."""
        path = f"/storage/v1/b/{_quoted(bucket)}/o/{_quoted(name)}?alt=media"
        return self._call(path)

    def upload(self, bucket: str, name: str, source: str) -> None:
        """Store the file *source* as an object, which appears as a whole. Raises: OSError."""
        path = f"/upload/storage/v1/b/{_quoted(bucket)}/o?uploadType=media&name={_quoted(name)}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(os.path.getsize(source))}
        with open(source, "rb") as stream, self._call(path, stream, headers) as answer:
            answer.read(1 << 16)

    def _call(self, path: str, body: BinaryIO | None = None, headers: dict[str, str] | None = None) -> BinaryIO:
        import urllib.request

        request = urllib.request.Request(
            self._base.rstrip("/") + path, data=body, headers={**self._headers, **(headers or {})}
        )
        answer: BinaryIO = self._opener.open(request, timeout=ASK_SECONDS)
        return answer

    def _get(self, path: str) -> object:
        import json

        with self._call(path) as answer:
            return json.loads(answer.read(1 << 24))


def in_bucket(address: str, name: str) -> tuple[str, str]:
    """Bucket and name of the object *name* below *address*, `gs://BUCKET/PATH`."""
    bucket, _, path = address[len("gs://") :].partition("/")
    return bucket, "/".join(part for part in (path.strip("/"), name) if part)


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _token() -> str:
    """The access token of the machine's service account; empty without one."""
    import http.client
    import json

    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    connection = http.client.HTTPConnection(host, timeout=5)
    try:
        connection.request("GET", TOKEN_PATH, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        token = json.loads(answer.read(1 << 16)) if answer.status == 200 else {}
        return str(token.get("access_token", ""))
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return ""
    finally:
        connection.close()


def _newest_by_tool(bucket: str) -> int | None:
    for tool in (["gcloud", "storage", "ls"], ["gsutil", "ls"]):
        if shutil.which(tool[0]):
            return _listed_by([*tool, bucket.rstrip("/") + f"/*/{COMMITTED}"])
    return None


def _listed_by(command: list[str]) -> int | None:
    import subprocess

    try:
        listing = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=ASK_SECONDS,
            check=False,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    names = [line.rsplit("/", 2)[-2] for line in listing.decode(errors="replace").split() if line.count("/") >= 2]
    return max((int(name) for name in names if name.isdigit() and name.isascii() and len(name) < 19), default=None)
