"""A small stand-in of the hub's HTTP interface: repositories with commits, in memory, served by a thread.

Reached as the hub is: through `HF_ENDPOINT`, which `huggingface_hub` reads when it is imported (`at_home` sets what it
has read in this process). It knows what a push and a download ask for: creating a repository, upload modes, large files
by way of git-lfs's batches, commits, what a revision holds, files.
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
REPO = r"(?:models|datasets)/[^/]+/[^/]+"


class Hub(ThreadingHTTPServer):
    """Repositories by kind and name (`models/org/name`): a list of commits, each an id and all files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, list[tuple[str, Files]]] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repo: str, files: Files) -> str:
        """Add files to a repository's last commit; gives the new one's id."""
        commits = self.repos.setdefault(repo, [(commit_id(repo), {})])
        commits.append((commit_id(f"{repo} {len(commits)}"), {**commits[-1][1], **files}))
        return commits[-1][0]

    def publish(self, repo: str, folder: Path) -> str:
        """A folder as a repository."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.commit(f"models/{repo}", files)

    def at(self, repo: str, revision: str) -> tuple[str, Files] | None:
        commits = self.repos.get(repo, [])
        return next((commit for commit in reversed(commits) if revision in ("main", commit[0])), None)

    def files(self, repo: str) -> Files:
        return self.repos[f"models/{repo}"][-1][1]


def commit_id(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


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

    def missing(self, kind: str) -> None:
        self.json({"error": f"{kind} not found"}, 404, X_Error_Code=f"{kind}NotFound")

    def handled(self) -> tuple[str, bytes]:
        """The path that is asked for, and the body that came with it."""
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.server.asked.append(f"{self.command} {path}")
        if self.headers.get("Transfer-Encoding") != "chunked":
            return path, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return path, body

    def do_GET(self) -> None:
        path, _ = self.handled()
        if match := re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.file(f"{match[1] or 'models/'}{match[2]}", match[3], match[4])
        if match := re.fullmatch(rf"api/({REPO})(?:/(?:revision|tree)/([^/]+))?", path):
            return self.facts(match[1], match[2] or "main", "/tree/" in path)
        return self.missing("Entry")

    do_HEAD = do_GET

    def facts(self, repo: str, revision: str, tree: bool) -> None:
        """What a revision holds, as a tree or with the metadata of its card."""
        commit = self.server.at(repo, revision)
        if commit is None:
            return self.missing("Repo" if repo not in self.server.repos else "Revision")
        files = {name: {"size": len(content)} for name, content in sorted(commit[1].items())}
        if tree:
            return self.json([{"type": "file", "path": n, "oid": commit_id(n), **size} for n, size in files.items()])
        parts, name = commit[1].get("README.md", b"").decode().split("---\n"), repo.partition("/")[2]
        siblings = [{"rfilename": n, **size} for n, size in files.items()]
        data = yaml.safe_load(parts[1]) if len(parts) > 2 else {}
        return self.json({"id": name, "modelId": name, "sha": commit[0], "siblings": siblings, "cardData": data})

    def file(self, repo: str, revision: str, name: str) -> None:
        commit = self.server.at(repo, revision)
        if commit is None:
            return self.missing("Repo" if repo not in self.server.repos else "Revision")
        if name not in commit[1]:
            return self.json({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit[0])
        content = commit[1][name]
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, end = int(match[1]), min(int(match[2]) + 1, len(content))
            place = f"bytes {begin}-{end - 1}/{len(content)}"
            return self.answer(content[begin:end], 206, Content_Range=place, X_Repo_Commit=commit[0])
        return self.answer(content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=commit[0])

    def do_PUT(self) -> None:
        """A large file; stored under its hash, which has to be its name."""
        path, content = self.handled()
        oid = hashlib.sha256(content).hexdigest()
        self.server.blobs[oid] = content
        self.answer(b"", 200 if path == f"blobs/{oid}" else 400)

    def do_POST(self) -> None:
        path, body = self.handled()
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(body)
        if match := re.fullmatch(r"blobs/([0-9a-f]{64})/verify", path):
            return self.json({}, 200 if len(self.server.blobs.get(match[1], b"")) == json.loads(body)["size"] else 404)
        if path == "api/validate-yaml":
            head = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            return self.json({"warnings": [], "errors": [] if isinstance(head, dict) else [{"message": "no metadata"}]})
        if path == "api/repos/create":
            options = json.loads(body)
            name = f"{options.get('organization') or 'me'}/{options['name']}"
            self.server.repos.setdefault(f"models/{name}", [(commit_id(f"models/{name}"), {})])
            return self.json({"url": f"{self.server.url}/{name}", "name": name})
        match = re.fullmatch(rf"api/({REPO})/(preupload|commit)/main", path)
        if match is None or match[1] not in self.server.repos:
            return self.missing("Repo")
        if match[2] == "commit":
            return self.committed(match[1], body)
        modes = {x["path"]: "lfs" if x["path"].endswith(LARGE) else "regular" for x in json.loads(body)["files"]}
        return self.json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    def batch(self, body: bytes) -> None:
        """Where large files are to be sent to, https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md."""
        objects = json.loads(body)["objects"]
        for entry in objects:
            if entry["oid"] not in self.server.blobs:
                place = f"{self.server.url}/blobs/{entry['oid']}"
                entry["actions"] = {"upload": {"href": place}, "verify": {"href": f"{place}/verify"}}
        self.json({"transfer": "basic", "objects": objects})

    def committed(self, repo: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.decode().splitlines()]
        files = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
        large = {x["value"]["path"]: x["value"]["oid"] for x in lines if x["key"] == "lfsFile"}
        if not set(large.values()) <= set(self.server.blobs):
            return self.json({"error": "a large file was not sent"}, 400)
        name = self.server.commit(repo, files | {place: self.server.blobs[oid] for place, oid in large.items()})
        url = f"{self.server.url}/{repo.removeprefix('models/')}/commit/{name}"
        return self.json({"commitOid": name, "commitUrl": url})


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
    values = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(cache)}
    values["HUGGINGFACE_CO_URL_TEMPLATE"] = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in values.items():
        patch.setattr(constants, name, value)
    patch.setattr(api, "endpoint", hub.url)
    patch.setattr("transformers.utils.hub._hf_api", None)  # made once a process, for the hub of its first use
    patch.setattr("rotation_merge.model.hub._answers", {})
    patch.setattr("rotation_merge.model.hub._silenced", False)
    patch.setattr("socket.getaddrinfo", _only_home(socket.getaddrinfo))


def _only_home(real: Callable[..., Any]) -> Callable[..., Any]:
    """Names are looked up for this machine alone: whoever asks another hub tries again for half a minute."""

    def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in ("127.0.0.1", "localhost"):
            pytest.fail(f"{host} was asked instead of the stand-in")  # no Exception: nobody catches it
        return real(host, *arguments, **options)

    return lookup
