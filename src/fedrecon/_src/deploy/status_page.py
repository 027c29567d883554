"""The operator's view of a run's folder: a page with a learning curve, and the records as server-sent events.

GET /                 the page
GET /events?after=N   `metrics.jsonl` as server-sent events, from the record after the N-th on
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import json
import math
import os
import string
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from fedrecon._src.deploy.coordinator import round_cells
from fedrecon._src.deploy.http_server import run_server, whole_number
from fedrecon._src.storage.run_folder import RunFolder

POLL_SECONDS = 0.5  # between two looks at the file
SHOWN_ROUNDS = 20
CURVE_POINTS = 400  # at most; longer runs are thinned out
WIDTH, HEIGHT, MARGIN = 400, 200, 50
LOCAL = ("127.0.0.1", "localhost", "::1")
PAGE = (Path(__file__).parent / "status_page.html").read_text(encoding="utf-8")


def _hash(element: str) -> str:
    """Return what lets the content security policy pass the style or script of the page."""
    text = PAGE.split(f"<{element}>")[1].split(f"</{element}>")[0]
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; connect-src 'self'; script-src {_hash('script')}; "
    f"style-src {_hash('style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def number(value: Any) -> str:
    """Write a number with four digits; a dash for one that is missing."""
    return f"{value:.4g}" if _is_number(value) else "–"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def render_curve(records: Sequence[Mapping[str, Any]]) -> str:
    """Draw the loss of rounds as a line and that of evaluations as dots, in SVG."""
    curves: dict[str, list[tuple[int, float]]] = {"round": [], "evaluation": []}
    for record in records:
        loss = record.get("micro", record).get("loss")
        curves[record["kind"]] += [(record["round"], loss)] if _is_number(loss) else []
    curves = {kind: points[:: math.ceil(len(points) / CURVE_POINTS) or 1] for kind, points in curves.items()}
    points = curves["round"] + curves["evaluation"]
    if not points:
        return "<p>No loss has been reported yet.</p>"
    last, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (point[0] - 1) / max(last - 1, 1), (point[1] - low) / ((high - low) or 1)
        return MARGIN + x * (WIDTH - MARGIN - 10), HEIGHT - 30 - y * (HEIGHT - 50)

    line = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in curves["round"])
    shapes = [f'<line x1="{MARGIN}" y1="{y}" x2="{WIDTH - 10}" y2="{y}"/>' for y in (20, HEIGHT - 30)]
    shapes += [f'<polyline points="{line}"/>']
    shapes += ['<circle r="3.5" cx="{:.1f}" cy="{:.1f}"/>'.format(*place(p)) for p in curves["evaluation"]]
    texts = [(0, 24, number(high)), (0, HEIGHT - 26, number(low)), (MARGIN, HEIGHT - 8, "round 1")]
    texts += [(WIDTH - 70, HEIGHT - 8, f"round {last}")] * (last > 1)
    shapes += [f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in texts]
    drawn = curves["round"] or curves["evaluation"]  # rounds with noise report no loss
    title = f"Loss from {number(drawn[0][1])} in round {drawn[0][0]} to {number(drawn[-1][1])}"
    legends = {"round": "Line: loss of training rounds.", "evaluation": "Dots: loss of held-out users."}
    legend = " ".join(text for kind, text in legends.items() if curves[kind])
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(shapes)}</svg><p>{legend}</p>'


def render_page(records: Sequence[Mapping[str, Any]], rounds: int, facts: Mapping[str, Any]) -> str:
    """Return the page of a run that has so many rounds in all, with facts about the coordinator."""
    done = [record for record in records if record["kind"] == "round"]
    newest = done[-1] if done else {}
    title = f"Round {newest.get('round', 0)} of {rounds}"
    values = {
        "Round": f"{newest.get('round', 0)} of {rounds}",
        "Loss": number(newest.get("loss")),
        "Seconds in all": number(sum(record["seconds"] for record in done)),
        "MB sent": number(sum(record["bytes_sent"] for record in done) / 1e6),
        "MB received": number(sum(record["bytes_received"] for record in done) / 1e6),
        "Epsilon": number(newest["epsilon"]) if "epsilon" in newest else "none promised",
        **facts,
    }
    items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>" for name, value in values.items())
    cells = [round_cells(record) for record in reversed(done[-SHOWN_ROUNDS:])]
    head = "".join(f'<th scope="col">{name}</th>' for name in (cells[0] if cells else ()))
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) for row in cells)
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    curve, page = render_curve(records), string.Template(PAGE)
    return page.substitute(title=title, records=len(records), items=items, curve=curve, head=head, rows=rows)


@contextlib.contextmanager
def serve_status(
    folder: RunFolder, rounds: int, facts: Callable[[], Mapping[str, Any]], address: tuple[str, int]
) -> Iterator[int]:
    """Serve the status page of a run in a thread; yields the port.

    Args:
      folder: the run's.
      rounds: how many it has in all.
      facts: returns what else the page shows, by name.
      address: host and port. At a local address, only requests to a local name are answered, so that no other web page
        can reach this one through a name of its own.
    """
    closing = threading.Event()

    def read() -> list[dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged lines, which whoever resumes the run hears of
            return folder.records()

    def show_page(request: Request) -> Response:
        return HTMLResponse(render_page(read(), rounds, facts()), headers=HEADERS)

    async def events(count: int) -> AsyncIterator[str]:
        size = -1
        yield "retry: 2000\n\n"
        while not closing.is_set():
            path = folder.metrics_path
            if path.exists() and (now := os.stat(path).st_size) != size:
                size = now
                for k, record in enumerate((await asyncio.to_thread(read))[count:], count + 1):
                    count = k
                    yield f"id: {k}\ndata: {json.dumps(record)}\n\n"
            await asyncio.sleep(POLL_SECONDS)

    async def stream(request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after", "0")
        return StreamingResponse(events(whole_number(after, 9) or 0), headers=HEADERS, media_type="text/event-stream")

    names = [*LOCAL, "[::1]"] if address[0] in LOCAL else ["*"]
    app = Starlette(
        routes=[Route("/", show_page), Route("/events", stream)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)],
    )
    with run_server(app, address, stop=closing.set, limit_concurrency=100) as port:
        yield port
