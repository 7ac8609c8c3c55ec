"""A hub on this machine: what `huggingface_hub` calls of Hugging Face's protocol, and faults."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
import yaml

TOKEN = "hf_tests"


@dataclass
class Repository:
    """Files by commit, and what branches and tags point to."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit with these files beside those of the one before; return its name."""
        files = {**self.commits.get(self.refs.get(ref, ""), {}), **files}
        seed = [len(self.commits), *((name, git_id(data)) for name, data in files.items())]
        commit = hashlib.sha1(repr(seed).encode()).hexdigest()
        self.commits[commit], self.refs[ref] = files, commit
        return commit


class HubServer(ThreadingHTTPServer):
    """Serves `repositories` by "owner/name"; who sends `TOKEN` sees the private ones."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.uploaded: dict[str, bytes] = {}  # large files by SHA-256
        self.requests: list[str] = []
        self.cut: int | None = None  # bytes of a large file after which the connection ends
        self.status = 0  # of every answer instead of the right one
        self.etag = ""  # of every file instead of the right one
        self.about: object = None  # what is said of a revision instead of what is right
        self.body: Callable[[_Handler], None] | None = None  # writes what is at "/resolve/"
        self.tokens: list[tuple[str, str]] = []  # paths, and the Authorization sent to them

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, content: bytes = b"", status: int = 200, **headers: object) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content)

    def _json(self, content: object, status: int = 200, **headers: object) -> None:
        self._answer(json.dumps(content).encode(), status, **headers)

    def _error(self, status: int, code: str, message: str = "no") -> None:
        self._json({"error": message}, status, X_Error_Code=code, X_Error_Message=message)

    @property
    def _has_token(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _find(self, name: str) -> Repository | None:
        """The repository, unless this one may not see it, which is answered."""
        found = self.server.repositories.get(name)
        if found is None or found.private and not self._has_token:
            if self._has_token:
                self._error(404, "RepoNotFound", "Repository not found")
            else:
                self._error(401, "RepoNotFound", "Invalid username or password.")
            return None
        return found

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self._find(name)
        if repository is None:
            return None
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, repository.commits[commit]

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        self.server.tokens.append((path, self.headers["Authorization"] or ""))
        if self.server.status:
            self._error(self.server.status, "Failed")
        elif self.server.body and "/resolve/" in path:
            self.close_connection = True
            with contextlib.suppress(OSError):  # a client may have heard enough
                self.server.body(self)
        elif self.server.about is not None and path.startswith("/api/"):
            self._json(self.server.about)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._about(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*found.groups())
        elif found := re.fullmatch(r"/cdn/(\w+)", path):
            self._send_large(self.server.uploaded[found[1]])
        else:
            self._error(404, "NotFound")

    do_HEAD = do_GET

    def _about(self, name: str, revision: str) -> None:
        if found := self._files(name, revision):
            commit, files = found
            siblings = [
                {"rfilename": one, "size": len(data), "blobId": git_id(data)}
                for one, data in files.items()
            ]
            private = self.server.repositories[name].private
            self._json({"id": name, "sha": commit, "private": private, "siblings": siblings})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._files(name, revision)
        if not found:
            return
        commit, files = found
        if self.server.repositories[name].gated:
            self._error(403, "GatedRepo", "Access is restricted")
        elif path not in files:
            self._error(404, "EntryNotFound")
        elif path.endswith(".safetensors"):  # as large files are
            digest = hashlib.sha256(files[path]).hexdigest()
            self.server.uploaded.setdefault(digest, files[path])
            etag = self.server.etag or digest
            linked = {"X_Linked_Size": len(files[path]), "X_Linked_ETag": f'"{etag}"'}
            place = f"http://localhost:{self.server.server_port}/cdn/{digest}"  # another host
            self._answer(b"", 302, X_Repo_Commit=commit, Location=place, **linked)
        else:
            etag = self.server.etag or git_id(files[path])
            self._answer(files[path], X_Repo_Commit=commit, ETag=f'"{etag}"')

    def _send_large(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content[: self.server.cut])
        self.close_connection = self.server.cut is not None

    def do_POST(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.server.status:
            self._error(self.server.status, "Failed")
        elif path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---")[1])
            self._json({"errors": [], "warnings": []})
        elif not self._has_token:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/.+", path):
            paths = [one["path"] for one in json.loads(body)["files"]]
            modes = {one: "lfs" if one.endswith(".safetensors") else "regular" for one in paths}
            files = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
            self._json({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.server.url}/upload/{one['oid']}"}}
            self._json({"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(found[1], found[2], body)
        else:
            self._error(404, "NotFound")

    def _create(self, asked: dict) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] == "others":
            self._error(403, "", "You don't have the rights to create a model there")
        elif name in self.server.repositories:
            self._json({"url": f"{self.server.url}/{name}"}, 409)
        else:
            private = asked.get("visibility") == "private" or asked.get("private", False)
            made = self.server.repositories[name] = Repository(private)
            made.commit({".gitattributes": b""})
            self._json({"url": f"{self.server.url}/{name}"})

    def _commit(self, name: str, revision: str, body: bytes) -> None:
        files = {}
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                files[value["path"]] = self.server.uploaded[value["oid"]]
        commit = self.server.repositories[name].commit(files, revision)
        url = f"{self.server.url}/{name}/commit/{commit}"
        self._json({"success": True, "commitUrl": url, "commitOid": commit})

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.uploaded[self.path.rpartition("/")[2]] = content
        self._answer()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def running_hub(folder):
    """A hub until the end of the block, which the client of this process asks, without a token."""
    from huggingface_hub import constants

    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(server, folder).items():
            patch.setenv(name, value)
        patch.delenv("HF_TOKEN", raising=False)
        files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        patch.setattr(constants, "HF_HUB_CACHE", f"{folder}/hub")
        patch.setattr(constants, "HF_TOKEN_PATH", f"{folder}/token")
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def variables(server: HubServer, folder) -> dict[str, str]:
    """The environment of a command that asks this hub."""
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
