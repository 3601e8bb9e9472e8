"""A small stand-in of the hub's HTTP interface: repositories with commits, in memory, served by a thread.

Reached as the hub is: through `HF_ENDPOINT`, which `huggingface_hub` reads when it is imported (`at_home` sets what it
has read in this process). It knows what a push and a pull ask for: creating a repository, upload modes, large files by
way of git-lfs's batches, commits, what a revision holds, files.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

Files = dict[str, bytes]

LARGE = (".safetensors", ".bin", ".model")
"""Endings of files that the hub wants by way of git-lfs (or of Xet, which stands in front of it)."""


class Hub(ThreadingHTTPServer):
    """Repositories by kind and name (`models/org/name`): a list of commits, each an id and all files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, list[tuple[str, Files]]] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def create(self, repo: str) -> None:
        self.repos.setdefault(repo, [(commit_id(repo), {})])

    def commit(self, repo: str, files: Files) -> str:
        """Add files to a repository's last commit; gives the new one's id."""
        self.create(repo)
        whole = {**self.repos[repo][-1][1], **files}
        name = commit_id(f"{repo} {len(self.repos[repo])}")
        self.repos[repo].append((name, whole))
        return name

    def publish(self, repo: str, folder: Path) -> str:
        """A folder as a repository."""
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.commit(f"models/{repo}", found)

    def at(self, repo: str, revision: str) -> tuple[str, Files] | None:
        commits = self.repos.get(repo, [])
        if revision == "main":
            return commits[-1] if commits else None
        return next((commit for commit in commits if commit[0] == revision), None)

    def files(self, repo: str) -> Files:
        return self.repos[f"models/{repo}"][-1][1]


def commit_id(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def card_data(card: str) -> dict[str, Any]:
    """The metadata of a card."""
    parts = card.split("---\n")
    return yaml.safe_load(parts[1]) if len(parts) > 2 else {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, content: Any, code: int = 200, **headers: str) -> None:
        self.answer(json.dumps(content).encode(), code, Content_Type="application/json", **headers)

    def missing(self, what: str) -> None:
        self.json({"error": f"{what} not found"}, 404, X_Error_Code=f"{what}NotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.server.asked.append(f"{self.command} {path}")
        if match := re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.file(f"{match[1] or 'models/'}{match[2]}", match[3], match[4])
        if match := re.fullmatch(r"api/((?:models|datasets)/[^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+))?", path):
            found = self.server.at(match[1], match[2] or "main")
            if found is None:
                return self.missing("Repo" if match[1] not in self.server.repos else "Revision")
            names = sorted(found[1])
            if "/tree/" in path:
                return self.json(
                    [{"type": "file", "path": n, "size": len(found[1][n]), "oid": commit_id(n)} for n in names]
                )
            name = match[1].partition("/")[2]
            return self.json(
                {
                    **{"id": name, "modelId": name, "sha": found[0]},
                    "siblings": [{"rfilename": n, "size": len(found[1][n])} for n in names],
                    "cardData": card_data(found[1].get("README.md", b"").decode()),
                }
            )
        return self.missing("Entry")

    def file(self, repo: str, revision: str, name: str) -> None:
        found = self.server.at(repo, revision)
        if found is None:
            return self.missing("Repo" if repo not in self.server.repos else "Revision")
        if name not in found[1]:
            return self.json({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=found[0])
        content = found[1][name]
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, end = int(match[1]), min(int(match[2]) + 1, len(content))
            self.server.sent += end - begin
            place = f"bytes {begin}-{end - 1}/{len(content)}"
            return self.answer(content[begin:end], 206, Content_Range=place, X_Repo_Commit=found[0])
        self.server.sent += len(content) if self.command == "GET" else 0
        tag = hashlib.sha256(content).hexdigest()
        return self.answer(content, ETag=f'"{tag}"', X_Repo_Commit=found[0])

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def do_PUT(self) -> None:
        """A large file; kept where it is what its name says."""
        path, content = self.path.lstrip("/"), self.read_body()
        self.server.asked.append(f"PUT {path}")
        oid = hashlib.sha256(content).hexdigest()
        self.server.blobs[oid] = content
        self.answer(b"", 200 if path == f"blobs/{oid}" else 400)

    def batch(self, body: bytes) -> None:
        """Where large files are to be sent to, https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md."""
        objects = json.loads(body)["objects"]
        for one in objects:
            if one["oid"] not in self.server.blobs:
                place = f"{self.server.url}/blobs/{one['oid']}"
                one["actions"] = {"upload": {"href": place}, "verify": {"href": f"{place}/verify"}}
        self.json({"transfer": "basic", "objects": objects})

    def do_POST(self) -> None:
        path = urlsplit(self.path).path.lstrip("/")
        body = self.read_body()
        self.server.asked.append(f"POST {path}")
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(body)
        if match := re.fullmatch(r"blobs/([0-9a-f]{64})/verify", path):
            return self.json({}, 200 if len(self.server.blobs.get(match[1], b"")) == json.loads(body)["size"] else 404)
        if path == "api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            self.server.create(f"models/{name}")
            return self.json({"url": f"{self.server.url}/{name}", "name": name})
        if path == "api/validate-yaml":
            head = json.loads(body)["content"].split("---\n")[1]
            fit = isinstance(yaml.safe_load(head), dict)
            return self.json({"warnings": [], "errors": [] if fit else [{"message": "no metadata"}]})
        match = re.fullmatch(r"api/(models/[^/]+/[^/]+)/(preupload|commit)/main", path)
        if match is None or match[1] not in self.server.repos:
            return self.missing("Repo")
        if match[2] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [(p, "lfs" if p.endswith(LARGE) else "regular") for p in paths]
            return self.json({"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes]})
        lines = [json.loads(line) for line in body.decode().splitlines()]
        files = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
        large = {x["value"]["path"]: x["value"]["oid"] for x in lines if x["key"] == "lfsFile"}
        if not set(large.values()) <= set(self.server.blobs):
            return self.json({"error": "a large file was not sent"}, 400)
        files |= {place: self.server.blobs[oid] for place, oid in large.items()}
        name = self.server.commit(match[1], files)
        repo = match[1].removeprefix("models/")
        return self.json({"commitOid": name, "commitUrl": f"{self.server.url}/{repo}/commit/{name}"})


@contextlib.contextmanager
def served() -> Iterator[Hub]:
    """A hub that listens while the block runs."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def at_home(hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """What `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_HUB_DISABLE_XET`, no `HF_HUB_OFFLINE` would have set before
    the imports."""
    from huggingface_hub import constants
    from huggingface_hub.hf_api import api

    patch.setenv("HF_TOKEN", "hf_none")
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(api, "endpoint", hub.url)
    patch.setattr("transformers.utils.hub._hf_api", None)  # made once a process, for the hub of its first use
    patch.setattr("rotation_merge.model.hub._answers", {})
    patch.setattr("rotation_merge.model.hub._silenced", False)
    patch.setattr("socket.getaddrinfo", _only_home(socket.getaddrinfo))


def _only_home(found: Callable[..., Any]) -> Callable[..., Any]:
    """Names are looked up for this machine alone: whoever asks another hub tries again for half a minute."""

    def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in ("127.0.0.1", "localhost"):
            pytest.fail(f"{host} was asked instead of the stand-in")  # no Exception: nobody catches it
        return found(host, *arguments, **options)

    return lookup
