"""Receive the gateway's webhooks: check each signature, then pass the message on. Standard library only.

export WEBHOOK_SECRET="$(arbitrage webhooks secret)"
python webhook_receiver.py 8090
"""

import base64
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = base64.b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
TOLERANCE = 300  # seconds: an older message may be a replay of one that was intercepted
LARGEST = 65536
seen = set()  # a message may arrive twice; in production, keep these ids where a restart finds them


def pass_on(message: dict[str, Any]) -> None:
    """Print a message; put your chat, pager or mail here."""
    print(message["type"], message["data"], flush=True)


class Receiver(BaseHTTPRequestHandler):
    """Accepts messages with a valid signature, each once."""

    def do_POST(self) -> None:
        """Check a message, then pass it on."""
        body = self.rfile.read(min(int(self.headers.get("content-length", 0)), LARGEST))
        id, sent = self.headers.get("webhook-id", ""), self.headers.get("webhook-timestamp", "")
        digest = hmac.digest(KEY, f"{id}.{sent}.".encode() + body, "sha256")
        expected = f"v1,{base64.b64encode(digest).decode()}"
        given = self.headers.get("webhook-signature", "").split()  # several during a rotation of the secret
        valid = any(hmac.compare_digest(one.encode(), expected.encode()) for one in given)
        if not valid or abs(time.time() - int(sent)) > TOLERANCE:
            self.send_error(401)
            return
        if id not in seen:
            seen.add(id)
            pass_on(json.loads(body))
        self.send_response(204)  # at once: whatever takes long belongs in a queue
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the output to the messages."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver)
    print(f"listening on port {server.server_port}", flush=True)
    server.serve_forever()
