"""A reward server in plain Python, for scorers in any language: the protocol of docs/rewards/http.md, in JSON.

In a recipe: `reward: {scorers: [{name: http, params: {urls: ["http://127.0.0.1:8700"], form: json}}]}`
"""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(sample: dict[str, Any]) -> dict[str, Any]:
    pixels = base64.b64decode(sample["media"]["image"]["data"])  # uint8 (3, height, width)
    return {"value": sum(pixels) / len(pixels) / 255, "parts": {"pixels": float(len(pixels))}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are used again

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = []
        for sample in request["samples"]:
            try:
                scores.append(score(sample))
            except Exception as error:  # noqa: BLE001 (the error is the answer)
                scores.append({"error": f"{type(error).__name__}: {error}"})
        body = json.dumps({"version": 1, "scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8700), Handler).serve_forever()
