"""A page and its coordinator under one address, for this machine: what a reverse proxy does on a real site.

Browsers send a page's requests only to where the page came from. So requests under /v1/ go on to the coordinator, and
all others to the server of the bundle. `/participation.json` is what the site's own backend would answer: where to take
part, and a token for a visitor that it trusts. Here that is everybody on this machine. A visitor's browser keeps a
random name and asks with it until they no longer take part; a site with accounts would use names of its own.
"""

from __future__ import annotations

import json
import re
import secrets
import ssl
import threading
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedrecon._src.device.web_page import serve
from fedrecon.deploy import issue_token

MOST_BYTES = 1 << 28  # of a report
SENT_ON = ("Authorization", "Content-Type", "If-None-Match")
RETURNED = (
    "Cache-Control",
    "Content-Security-Policy",
    "Content-Type",
    "Cross-Origin-Resource-Policy",
    "ETag",
    "Location",
    "Referrer-Policy",
    "Retry-After",
    "X-Content-Type-Options",
)


class PageServer:
    """Serves a bundle's page and passes reports on; a context manager."""

    def __init__(self, bundle: Path, coordinator: str, secret: bytes, authority: Path | None = None, port: int = 0):
        """Prepare to serve.

        Args:
          bundle: a bundle made for training, with its page.
          coordinator: its URL.
          secret: with which tokens are issued.
          authority: the certificate that vouches for the coordinator.
          port: on 127.0.0.1; 0 for any that is free.
        """
        self._pages = serve(bundle)
        target = urlsplit(coordinator)
        context = ssl.create_default_context(cafile=authority) if target.scheme == "https" else None
        handler = partial(_Proxy, self._pages.server_address[1], (target.hostname, target.port), context, secret)
        self._proxy = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.address = f"http://localhost:{self._proxy.server_address[1]}/web/"

    def __enter__(self) -> PageServer:
        for server in (self._pages, self._proxy):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for server in (self._proxy, self._pages):
            server.shutdown()
            server.server_close()


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests on."""

    protocol_version = "HTTP/1.1"

    def __init__(self, pages: int, coordinator: Any, context: ssl.SSLContext | None, secret: bytes, *rest: Any):
        self._pages, self._coordinator, self._context, self._secret = pages, coordinator, context, secret
        super().__init__(*rest)

    def do_GET(self) -> None:
        """Pass a request on, or invite a visitor."""
        url = urlsplit(self.path)
        if url.path == "/participation.json":
            name = parse_qs(url.query).get("device", [""])[0]
            name = name if re.fullmatch("[0-9a-f]{32}", name) else secrets.token_hex(16)
            token = issue_token(self._secret, f"visitor-{name}", seconds=3600)
            content = json.dumps({"server": "/", "token": token}).encode()
            return self._answer(200, {"Content-Type": "application/json", "Cache-Control": "no-store"}, content)
        size = int(self.headers.get("Content-Length") or 0)
        if size > MOST_BYTES:
            return self._answer(413, {}, b"")
        return self._pass_on(self.rfile.read(size))

    do_HEAD = do_PUT = do_GET

    def _pass_on(self, body: bytes) -> None:
        connection = self._connect()
        headers = {name: self.headers[name] for name in SENT_ON if name in self.headers}
        try:
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            returned = {name: response.headers[name] for name in RETURNED if name in response.headers}
            self._answer(response.status, returned, response.read())
        except (OSError, HTTPException):
            self._answer(502, {}, b"")
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        if not self.path.startswith("/v1/"):
            return HTTPConnection("localhost", self._pages, timeout=60)
        host, port = self._coordinator
        if self._context is None:
            return HTTPConnection(host, port, timeout=60)
        return HTTPSConnection(host, port, timeout=60, context=self._context)

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests, for privacy."""
