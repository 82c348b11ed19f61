"""
The newest complete checkpoint in a bucket, where nothing can be renamed: orbax puts `commit_success.txt` into the
folder of a step that is complete, and a folder without it is what a killed save left.

Asked of Cloud Storage's JSON API with the machine's own token, and where that does not let us in, of gcloud or gsutil,
which may be logged in otherwise. An answer takes long, so the runner asks on a slow schedule, and a probe reads the
last one. Standard library only, Python 3.8 and newer: this runs on the TPU VM.
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

PERIOD_SECONDS = 120
ASK_SECONDS = 60
PAGES_LIMIT = 100
# So many saves in a row that were killed before their end are not looked behind.
HALF_WRITTEN_LIMIT = 50
COMMITTED = "commit_success.txt"
SERVICE = "https://storage.googleapis.com"
TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"


def watch(bucket: str, answer: str) -> None:
    """Write the newest complete step of *bucket* (`gs://NAME/PATH`) into the file *answer*, every two minutes."""
    threading.Thread(target=_watch, args=(bucket, answer), daemon=True).start()


def _watch(bucket: str, answer: str) -> None:
    told = None
    while True:
        try:
            step = newest(bucket)
        except Exception:
            # Whatever an answer does (http.client has errors of its own for one that is cut), the next look comes: this
            # thread is all that asks, and nobody would learn of its end.
            step = _newest_by_tool(bucket)
        if step is not None and step != told and files.write_whole(answer, str(step)):
            told = step
        time.sleep(PERIOD_SECONDS)


def newest(bucket: str) -> int | None:
    """
    The newest complete step; None: there is none.

    Raises: OSError, ValueError, http.client.HTTPException: the service does not let us in, does not answer, answers
    nonsense, or half of an answer.
    """
    name, _, path = bucket[len("gs://") :].partition("/")
    path = path.strip("/") + "/" if path.strip("/") else ""
    ask = _Asker()
    steps = sorted(set(_steps(ask, name, path)), reverse=True)
    return next((step for step in steps[:HALF_WRITTEN_LIMIT] if ask.has(name, f"{path}{step}/{COMMITTED}")), None)


def _steps(ask: _Asker, bucket: str, path: str) -> Iterator[int]:
    """Numbers of the folders below *path*, complete or not."""
    token = ""
    for _ in range(PAGES_LIMIT):
        page = ask.list(bucket, path, token)
        prefixes = page.get("prefixes", [])
        if not isinstance(prefixes, list):
            raise ValueError("the listing's prefixes are no list")  # noqa: TRY004  (an answer, not an argument)
        for prefix in prefixes:
            folder = str(prefix)[len(path) :].strip("/")
            # `007` is not what orbax calls step 7; its folder would not be found under that number again.
            if folder.isdigit() and folder.isascii() and len(folder) < 19 and str(int(folder)) == folder:
                yield int(folder)
        token = str(page.get("nextPageToken") or "")
        if not token:
            return


class _Asker:
    """Reads the JSON API as this machine's service account."""

    def __init__(self) -> None:
        import urllib.request

        emulated = os.environ.get("STORAGE_EMULATOR_HOST", "")
        self._base = (emulated if "://" in emulated else f"http://{emulated}") if emulated else SERVICE
        # A proxy of the environment is for the real service.
        proxies = [urllib.request.ProxyHandler({})] if emulated else []
        self._opener = urllib.request.build_opener(*proxies)
        token = _token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def list(self, bucket: str, prefix: str, page: str) -> dict[str, object]:
        from urllib.parse import urlencode

        query = {"prefix": prefix, "delimiter": "/", "fields": "prefixes,nextPageToken"}
        if page:
            query["pageToken"] = page
        said = self._get(f"/storage/v1/b/{_quoted(bucket)}/o?{urlencode(query)}")
        if not isinstance(said, dict):
            raise ValueError("the listing is no object")  # noqa: TRY004  (an answer, not an argument)
        return said

    def has(self, bucket: str, name: str) -> bool:
        import urllib.error

        try:
            self._get(f"/storage/v1/b/{_quoted(bucket)}/o/{_quoted(name)}?fields=name")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return False
            raise
        return True

    def _get(self, path: str) -> object:
        import json
        import urllib.request

        request = urllib.request.Request(self._base.rstrip("/") + path, headers=self._headers)
        with self._opener.open(request, timeout=ASK_SECONDS) as answer:
            return json.loads(answer.read(1 << 24))


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _token() -> str:
    """The access token of the machine's service account; empty where there is none."""
    import http.client
    import json

    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    connection = http.client.HTTPConnection(host, timeout=5)
    try:
        connection.request("GET", TOKEN_PATH, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        said = json.loads(answer.read(1 << 16)) if answer.status == 200 else {}
        return str(said.get("access_token", ""))
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
