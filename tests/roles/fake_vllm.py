"""A process that behaves as a vLLM server does from outside: python fake_vllm.py BEHAVIOUR PORT."""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from omni_async.roles.vllm_process import _end_with_parent


class Handler(BaseHTTPRequestHandler):
    behaviour, is_ready = "", False

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == f"Bearer {os.environ['VLLM_API_KEY']}"
        body = json.dumps({"data": [{"id": "qwen"}]}).encode()
        if self.path == "/health":
            status = 503 if self.behaviour == "dies later" and Handler.is_ready else 200
        else:
            status, Handler.is_ready = 200 if allowed and self.behaviour != "stranger" else 401, True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def main() -> None:
    import threading

    behaviour, port = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if behaviour == "crash":
        sys.stderr.write(f"ValueError: no kernel image for {os.environ['VLLM_API_KEY']}\n")
        sys.exit(3)
    if behaviour == "silent":
        time.sleep(600)
    Handler.behaviour = behaviour
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
