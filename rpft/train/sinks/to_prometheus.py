"""The last step's figures at http://127.0.0.1:PORT/metrics, in the text format of Prometheus."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rpft.errors import UserError
from rpft.recipe.schema import Recipe

ADDRESS = "127.0.0.1"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ToPrometheus:
    """Serves on this machine alone."""

    name = "the Prometheus endpoint"

    def __init__(self, port: int) -> None:
        """``port``: 0 takes any that is free. OSError where it is taken."""
        self._text = b""
        self._figures: dict[str, float] = {}
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                text = sink._text
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are nobody's news."""

        self._server = ThreadingHTTPServer((ADDRESS, port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def begin(self, first_step: int) -> None:
        """There is no history there."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._figures.update(figures, step=step)
        self._text = exposition(self._figures).encode()

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()


def exposition(figures: dict[str, float]) -> str:
    """``figures`` in the text format; "peak_bytes/cuda:0" becomes a label."""
    lines: list[str] = []
    for name, value in sorted(figures.items()):
        metric, _, worker = name.partition("/")
        kind = f"# TYPE rpft_{metric} gauge"
        if kind not in lines:
            lines.append(kind)
        label = f'{{worker="{worker}"}}' if worker else ""
        lines.append(f"rpft_{metric}{label} {value!r}")
    return "".join(line + "\n" for line in lines)


def make(recipe: Recipe) -> ToPrometheus:
    port = recipe.logging.prometheus_port
    assert port is not None
    try:
        return ToPrometheus(port)
    except OSError as error:
        raise UserError(
            f"logging.prometheus_port {port} of {ADDRESS} cannot be used: {error.strerror}; name another"
        ) from error
