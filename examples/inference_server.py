#!/usr/bin/env python3
"""
Serve a model over HTTP. Standard library only, so the example starts on any TPU VM at once.

    POST /generate  {"prompt": "The ", "length": 80, "seed": 0}  ->  {"text": "The ..."}
    GET  /health    {"model": ..., "requests": ..., "seconds": ...}

The model is the smallest that generates text: it counts, in a file, the characters that follow each five characters.
Replace it with yours: keep `Model.generate`, and load the model before the server listens, so that `/health` answers
only when the model is ready.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LONGEST = 10_000


class Model:
    """Counts which character follows each run of up to `order` characters."""

    def __init__(self, text: str, order: int = 5) -> None:
        self.order = order
        self.following: dict[str, str] = {}
        followers: defaultdict[str, list[str]] = defaultdict(list)
        for length in range(order + 1):
            for place in range(length, len(text)):
                followers[text[place - length : place]].append(text[place])
        self.following = {context: "".join(found) for context, found in followers.items()}

    def generate(self, prompt: str, length: int, seed: int) -> str:
        rng = random.Random(seed)
        text = prompt
        for _ in range(length):
            # The longest context that occurs in the text; the empty context always does.
            known = (text[len(text) - n :] for n in range(min(self.order, len(text)), -1, -1))
            text += rng.choice(next(self.following[context] for context in known if context in self.following))
        return text


class Handler(BaseHTTPRequestHandler):
    model: Model
    started = time.monotonic()
    requests = 0

    def do_GET(self) -> None:
        if self.path != "/health":
            return self.answer(404, {"error": f"there is no {self.path}"})
        seconds = round(time.monotonic() - self.started)
        return self.answer(200, {"model": len(self.model.following), "requests": Handler.requests, "seconds": seconds})

    def do_POST(self) -> None:
        if self.path != "/generate":
            return self.answer(404, {"error": f"there is no {self.path}"})
        try:
            wish = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            length = min(int(wish.get("length", 80)), LONGEST)
            text = self.model.generate(str(wish.get("prompt", "")), length, int(wish.get("seed", 0)))
        except (ValueError, TypeError, AttributeError) as error:
            return self.answer(400, {"error": f"send a JSON object with prompt, length and seed: {error}"})
        Handler.requests += 1
        return self.answer(200, {"text": text})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--text", type=Path, required=True, help="training text of the model")
    options = parser.parse_args()
    Handler.model = Model(options.text.read_text())
    ThreadingHTTPServer((options.address, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
