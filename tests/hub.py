"""A stand-in for the Hugging Face hub on this machine: shards, parquet, questions, and faults."""

import hashlib
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/tokens"
FAST = {"attempts": 4, "wait_seconds": 0.01}


def shard_bytes(num_tokens: int, first: int = 0) -> bytes:
    """A token shard as llm.c's tools write it."""
    header = struct.pack("<3i", 20240520, 1, num_tokens).ljust(1024, b"\0")
    return header + struct.pack(f"<{num_tokens}H", *range(first, first + num_tokens))


class Hub(ThreadingHTTPServer):
    """Serves `files` of every repository; `faults` holds, per method and file, what to do wrong.

    A fault is a status code with headers, "cut" (the connection ends at 60 %), "short" (a whole
    answer of 60 %), or "flip" (one wrong byte). Each is done once, unless it stands in `always`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.models: dict[str, bytes] = {}  # the same of repositories that hold models
        self.faults: dict[tuple[str, str], list] = {}
        self.always: dict[tuple[str, str], object] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.delay_seconds = 0.0  # before each answer
        self.sent: list[str] = []  # names of files whose content was sent, wholly or in part

    @property
    def address(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def asked(self, method: str) -> list[str | None]:
        """Ranges (None: the whole) that were asked for by this method."""
        return [asked for name, asked in self.requests if name == method]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the end of the block."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers HEAD and GET of files, and the two calls of the API that list a repository."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer("HEAD")

    def do_GET(self):
        if self.path.startswith("/api/"):
            self.list()
        else:
            self.answer("GET")

    def list(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(("API", None))
        fault = self.fault("API", "")
        if isinstance(fault, tuple):
            return self.head(fault[0], 0, fault[1])
        if "/tree/" in path:
            folder = path.partition("/tree/")[2].partition("/")[2]
            names = [
                name for name in self.server.files if name.startswith(f"{folder}/".lstrip("/"))
            ]
            content = json.dumps([self.describe(name) for name in sorted(names)])
        else:
            content = json.dumps({"id": REPOSITORY, "sha": COMMIT})
        self.head(200, len(content), {"Content-Type": "application/json"})
        self.wfile.write(content.encode())
        return None

    def describe(self, name):
        content = self.server.files[name]
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
        return {"type": "file", "path": name, "size": len(content), "oid": "0" * 40, "lfs": lfs}

    def fault(self, method, name):
        waiting = self.server.faults.get((method, name), [])
        return waiting.pop(0) if waiting else self.server.always.get((method, name))

    def answer(self, method):
        if self.server.delay_seconds:
            time.sleep(self.server.delay_seconds)
        self.server.requests.append((method, self.headers.get("Range")))
        name = unquote(self.path.partition("/resolve/")[2].partition("/")[2])
        of_data = self.path.startswith("/datasets/")
        content = (self.server.files if of_data else self.server.models).get(name)
        fault = self.fault(method, name)
        if content is None:
            return self.head(404, 0, {"X-Error-Code": "EntryNotFound"})
        if isinstance(fault, tuple):
            return self.head(fault[0], 0, fault[1])
        about = self.about(content)
        if method == "GET":
            self.server.sent.append(name)
        if fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault == "short":
            content = content[: int(len(content) * 0.6)]
        start = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
        if start:
            about["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.head(206 if start else 200, len(content) - start, about)
        if method == "GET":
            end = int(len(content) * 0.6) if fault == "cut" else len(content)
            self.wfile.write(content[start:end])
            self.close_connection = True
        return None

    def about(self, content):
        return {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            "ETag": '"weak"',
            "Accept-Ranges": "bytes",
        }

    def head(self, status, length, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()
