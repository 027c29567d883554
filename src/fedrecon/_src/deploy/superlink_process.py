"""The process of Flower's SuperLink: it dies with its parent, accepts no message above a size, and logs no request.

Run by its path, not imported: it needs Flower and nothing of fedrecon.
"""

import contextlib
import ctypes
import os
import signal
from typing import Any

MOST = "FEDRECON_MOST_BYTES"  # the environment variable that says how large a request may be


class Bounded:
    """An ASGI application that refuses requests above a size before it keeps any part of them."""

    def __init__(self, app: Any, most: int):
        """Stand before `app`."""
        self._app, self._most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on a request, unless it says that it is too large or turns out to be."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if not told.isdigit() or int(told) > self._most:
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            part = await receive()
            seen += len(part.get("body", b""))
            return part if seen <= self._most else {"type": "http.disconnect"}

        await self._app(scope, counted, send)


def main() -> None:
    """Start the SuperLink."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # on Linux: be killed when the parent is, however that happens
    import logging

    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    run, most = uvicorn.run, int(os.environ.get(MOST, 2**31))

    def bounded(app: Any, **options: Any) -> None:
        run(Bounded(app, most), **{**options, "access_log": False})

    uvicorn.run = bounded
    logging.getLogger("flwr").setLevel(logging.WARNING)  # a line for every request would fill the disk in time
    flower_superlink()


if __name__ == "__main__":
    main()
