"""A server that stands for wandb's."""

import gzip
import json
from http.server import BaseHTTPRequestHandler

KEY = "0123456789abcdef0123456789abcdef01234567"


class Server(BaseHTTPRequestHandler):
    """The part of wandb's server that a run, its artifacts and a workspace need."""

    protocol_version = "HTTP/1.1"
    project = {"id": "UA==", "name": "attnbench", "entity": {"id": "RQ==", "name": "me"}}  # noqa: RUF012
    bucket = {"id": "SUQ=", "name": "demo-softmax", "historyLineCount": 0, "project": project}  # noqa: RUF012
    status = 200
    uploaded: list[bytes] = []  # noqa: RUF012
    asked: list[dict] = []  # noqa: RUF012
    """Variables of all requests that create something."""
    files: dict[str, bytes] = {}  # noqa: RUF012
    """Uploaded files of artifacts, by name."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        if self.path.endswith("/file_stream"):
            self.uploaded.append(body)
        if b"RunResumeStatus" in body:
            # The server has had the rows up to step 20.
            tails = {"historyTail": json.dumps([json.dumps({"_step": 20})]), "eventsTail": "[]", "config": "{}"}
            counts = {"logLineCount": 0, "historyLineCount": 2, "eventsLineCount": 0}
            bucket = {**self.bucket, **tails, **counts, "summaryMetrics": "{}", "wandbConfig": '{"t": 1}'}
            return self.reply({"data": {"model": {**self.project, "bucket": bucket}}})
        variables = json.loads(body).get("variables") or {}
        self.asked.append(variables)
        data = {"upsertBucket": {"bucket": self.bucket, "inserted": True}, "project": None}
        data["createRunFiles"] = {"runID": "SUQ=", "uploadHeaders": [], "files": []}
        data["viewer"] = {"id": "SUQ=", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        data["upsertView"] = {"view": {"id": "SUQ=", "name": "nw-abc-v"}, "inserted": True}
        artifact = {"id": "QQ==", "state": "PENDING", "artifactSequence": {"id": "Uw==", "latestArtifact": None}}
        data["createArtifact"] = {"artifact": artifact}
        data["createArtifactManifest"] = {"artifactManifest": {"id": "TQ==", "file": self.file("manifest")}}
        data["updateArtifactManifest"] = data["createArtifactManifest"]
        wanted = [self.file(spec["name"]) for spec in variables.get("input", {}).get("artifactFiles", [])]
        data["createArtifactFiles"] = {"files": {"edges": [{"node": file} for file in wanted]}}
        data["commitArtifact"] = {"artifact": {"id": "QQ==", "digest": ""}}
        return self.reply({"data": data} if self.status == 200 else {"errors": [{"message": "no such user"}]})

    def do_PUT(self):
        self.files[self.path.removeprefix("/upload/")] = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply({})

    def do_GET(self):
        self.reply({})

    def file(self, name):
        there = {"id": "Rg==", "name": name, "displayName": name, "artifact": {"id": "QQ=="}, "storagePath": name}
        url = f"http://{self.headers['Host']}/upload/{name}"
        return {**there, "uploadUrl": url, "uploadHeaders": [], "uploadMultipartUrls": None}

    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass
