"""An OpenAI-compatible server in a thread, with whatever faults a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Complete = Callable[[dict], tuple[int, dict]]
"""Takes a request's body; gives the status and the body of the answer."""


@contextmanager
def fake_server(complete: Complete) -> Iterator[str]:
    """Serve `/v1/completions`; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = complete(body) if self.path == "/v1/completions" else (404, {"error": self.path})
            said = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            with suppress(BrokenPipeError):  # a client that was stopped
                self.wfile.write(said)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def choice(token_ids=None, text="", finish_reason="length", **fields) -> tuple[int, dict]:
    told = {} if token_ids is None else {"token_ids": token_ids}
    return 200, {"choices": [{"text": text, "finish_reason": finish_reason, **told, **fields}]}
