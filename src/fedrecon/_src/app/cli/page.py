"""`fedrecon page`."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import webbrowser
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Lt

from fedrecon._src.app.cli import options


@dataclass(frozen=True, kw_only=True)
class Page:
    """Serve a web page for a model, and open it in the browser.

    Rate items, or type text, and see what the model predicts. What you enter does not leave the browser.

    Example: fedrecon page runs/small

    Attributes:
      run: the folder of a run or of a saved model, which is bundled first, or of a bundle.
      port: the port to serve on. The browser keeps what you enter for this address and port; 0 takes a free port.
      open: open the browser.
      onnxruntime_web: text only: the dist folder of the npm package onnxruntime-web, which the page needs.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    port: Annotated[int, Ge(0), Lt(2**16)] = 0
    open: bool = True
    onnxruntime_web: Path | None = None


parse = partial(options.parse, Page, "page")


def run(args: Page) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    from fedrecon._src.device.web_page import serve
    from fedrecon_device.files import MANIFEST

    with tempfile.TemporaryDirectory(prefix="fedrecon-page-") as scratch:
        folder = args.run
        if not (folder / MANIFEST).is_file():
            from fedrecon._src.device.model_bundle import bundle_model
            from fedrecon._src.recommend.saved_models import open_model

            saved = open_model(folder)
            needs_onnx = saved.task.page_needs_onnx
            if needs_onnx and args.onnxruntime_web is None:
                advice = "then give --onnxruntime-web node_modules/onnxruntime-web/dist"
                raise options.UsageError(f"a page of text needs onnxruntime-web: npm install it, {advice}")
            runtime = args.onnxruntime_web
            folder = bundle_model(saved, Path(scratch) / "bundle", onnxruntime_web=runtime, onnx=needs_onnx)
        try:
            server = serve(folder, args.port)
        except OSError as problem:
            reason = f"cannot listen on port {args.port} ({problem.strerror})"
            raise options.UsageError(f"{reason}; choose another one with --port") from None
        address = f"http://localhost:{server.server_address[1]}/web/"
        print(f"{address}   (Ctrl-C to stop)", flush=True)
        if args.open:
            webbrowser.open(address)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was made for the page is removed then, too
        with server, contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
