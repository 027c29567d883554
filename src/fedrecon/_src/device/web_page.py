"""The page of a bundle: its files, filled in for this bundle, and a server for it on this machine."""

from __future__ import annotations

import json
import mimetypes
import sys
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from fedrecon._src.core.checks import check_rules
from fedrecon_device.bundle import ITEM_TASKS, ITEMS, TABLES, WORDS
from fedrecon_device.errors import BundleError
from fedrecon_device.files import MANIFEST, digest_of, read_checked, read_file, read_manifest

POLICY = (
    "default-src 'none'; script-src 'self'{wasm}; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'"
)
VENDORED = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
SWITCH = "web/sharing.js"  # a page that has it can take part in training
# by what a page does: the scripts that no other page has, and the files of the bundle that it reads
SCRIPTS = {
    "items": ("items", "ranking", "solvers"),
    "text": ("writing", "words"),
    "training": ("background", "keys", "participant", "plan", "sealing", "sharing", "training"),
    "graphs": ("onnx",),
}
READ = {
    "items": (TABLES, ITEMS),
    "text": (TABLES, WORDS, "reconstruct.onnx", "predict.onnx"),
    "training": ("plan.json", "update.onnx"),
}


def page_files(manifest: Mapping[str, Any], vendor: Path | None = None) -> dict[str, bytes]:
    """Return the files of the page by their name in the bundle.

    The page of a bundle with a device plan can take part in training if it has onnxruntime-web.

    Args:
      manifest: the bundle's manifest so far, without the page's own files.
      vendor: the folder `dist` of the npm package onnxruntime-web, for a page that runs graphs.

    Raises:
      ValueError: `vendor` lacks a file of onnxruntime-web.
    """
    ranks = manifest["task"] in ITEM_TASKS
    training = "plan.json" in manifest["files"] and vendor is not None
    does = {"items": ranks, "text": not ranks, "training": training, "graphs": training or not ranks}
    unused = {f"{name}.js" for part, needed in does.items() if not needed for name in SCRIPTS[part]}
    contents = {
        f"web/{source.name}": source.read_bytes()
        for source in package_files("fedrecon_device").joinpath("web").iterdir()
        if source.name.endswith((".js", ".css", ".html")) and source.name not in unused
    }
    if does["graphs"] and vendor is not None:
        check_vendor(vendor)
        contents |= {f"web/vendor/{name}": (vendor / name).read_bytes() for name in VENDORED}
    whole = {**manifest, "files": {**manifest["files"], **contents}}
    contents["web/index.html"] = _filled(contents["web/index.html"], {"@POLICY@": policy(whole)})
    read = [name for name in _files_read(whole) if name in manifest["files"]]
    digests = {name: digest_of(data) for name, data in contents.items()}
    digests |= {name: manifest["files"][name]["sha256"] for name in read}
    version = digest_of(json.dumps(digests, sort_keys=True).encode())[:16]
    offline = {*read, *contents} - {"web/sw.js", "update.onnx", "state.onnx"}  # training needs the server anyway
    if ranks:
        offline -= {f"web/vendor/{name}" for name in VENDORED}
    names = ", ".join(json.dumps(name) for name in sorted(offline))
    contents["web/sw.js"] = _filled(contents["web/sw.js"], {"@VERSION@": version, '"@FILES@"': names})
    return dict(sorted(contents.items()))


def needs_onnx(manifest: Mapping[str, Any]) -> bool:
    """Return whether a bundle's page runs graphs: for text and to train; solvers of items are in JavaScript."""
    return manifest["task"] not in ITEM_TASKS or SWITCH in manifest["files"]


def _files_read(manifest: Mapping[str, Any]) -> list[str]:
    """Return the files of the bundle that its page reads."""
    names = [*READ["items" if manifest["task"] in ITEM_TASKS else "text"]]
    if SWITCH in manifest["files"]:
        names += [*READ["training"], *({"state.onnx"} & set(manifest["files"]))]
    return names


def _filled(template: bytes, values: Mapping[str, str]) -> bytes:
    for mark, value in values.items():
        assert mark.encode() in template, mark
        template = template.replace(mark.encode(), value.encode())
    return template


def check_vendor(vendor: Path) -> None:
    """Check that a folder holds what a page needs of onnxruntime-web.

    Raises:
      ValueError: a file is missing.
    """
    where = "the folder dist of onnxruntime-web (npm install onnxruntime-web)"
    check_rules({f"{vendor} has no {name}: expected {where}": (vendor / name).is_file() for name in VENDORED})


def page_lacks(manifest: Mapping[str, Any]) -> str | None:
    """Return what a bundle's page needs and does not have; None if it has everything."""
    if not needs_onnx(manifest):
        return None
    needed = [*(f"web/vendor/{name}" for name in VENDORED), *_files_read(manifest)]
    return next((name for name in needed if name not in manifest["files"]), None)


def policy(manifest: Mapping[str, Any]) -> str:
    """Return the Content-Security-Policy of a bundle's page: its own files; WebAssembly only where ONNX needs it."""
    return POLICY.format(wasm=" 'wasm-unsafe-eval'" if needs_onnx(manifest) else "")


def serve(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of a bundle's files for browsers on this machine; call its `serve_forever`.

    Args:
      folder: the bundle. Files that its manifest does not name are not served; a bundle that replaces it is.
      port: on 127.0.0.1; 0 for any that is free.

    Raises:
      BundleError: the folder is not a bundle, or has no page.
    """
    manifest = read_manifest(folder)
    if "web/index.html" not in manifest["files"]:
        raise BundleError(f"{folder} has no page: bundles of ratings, clicks and text have one")
    if missing := page_lacks(manifest):
        raise BundleError(
            f"the page of {folder} lacks {missing}: npm install onnxruntime-web, then make the bundle again with "
            "--onnxruntime-web node_modules/onnxruntime-web/dist"
        )
    return _Server(("127.0.0.1", port), partial(_Files, folder, manifest))


class _Server(ThreadingHTTPServer):
    """A server that ignores browsers which disconnect in the middle of an answer."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Files(BaseHTTPRequestHandler):
    """Answers with files of one bundle."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, manifest: dict[str, Any], *rest: Any):
        self._folder, self._policy = folder, policy(manifest) + "; frame-ancestors 'none'"
        super().__init__(*rest)

    def do_GET(self) -> None:
        """Answer a request for a file."""
        port: int = self.server.server_address[1]  # type: ignore[index, assignment]
        if self.headers.get("Host") not in (f"localhost:{port}", f"127.0.0.1:{port}"):
            return self._answer(403, b"this page is for this machine\n")  # some other name that leads here
        path = self.path.split("?")[0]
        if path in ("/", "/web"):
            return self._answer(302, b"", {"Location": "/web/"})
        name = path.removeprefix("/") + ("index.html" if path == "/web/" else "")
        try:
            if name == MANIFEST:
                return self._answer(200, read_file(self._folder, MANIFEST, 1 << 20), kind="application/json")
            return self._answer(200, read_checked(self._folder, read_manifest(self._folder), name), kind=_kind(name))
        except BundleError:
            return self._answer(404, b"not in the bundle\n")

    do_HEAD = do_GET

    def _answer(self, code: int, body: bytes, more: Mapping[str, str] | None = None, kind: str = "text/plain") -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self._policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache",
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests, for privacy."""


def _kind(name: str) -> str:
    ours = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm"}
    kind = {**mimetypes.types_map, **ours}.get(Path(name).suffix, "application/octet-stream")
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
