"""An OpenAI-compatible server in a thread that misbehaves as it is told."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]


def completion(text: str, **changes: Any) -> bytes:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "token_ids": [7, 8]}
    return json.dumps({"choices": [{**choice, **changes}], "usage": {"completion_tokens": 2}}).encode()


def echo(asked: dict[str, Any]) -> Reply:
    said = [m["content"] for m in asked["messages"]]
    return 200, {}, completion(f"{len(said)}:{said[-1]}")


class Faulty:
    """Answers ``reply(request, how often this very request has come before)``; ``None`` drops the connection."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any], int], Reply | None] = lambda asked, before: echo(asked)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    before = outer.requests.count(asked)
                    outer.requests.append(asked)
                    outer.headers.append({"path": self.path, **dict(self.headers)})
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                try:
                    reply = outer.reply(asked, before)
                finally:
                    with outer.lock:
                        outer.at_once -= 1
                if reply is None:
                    self.close_connection = True
                    return
                code, headers, body = reply
                self.send_response(code)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
