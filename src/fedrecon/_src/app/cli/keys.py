"""`fedrecon keys`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from fedrecon._src.app.cli import options


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Make the keys and certificates of a deployment.

    Makes a certificate authority and a server certificate, if the folder has none, and node keys. Send every node
    ca.crt and its own key; keep the rest. Example: fedrecon keys keys --host fed.example.org --nodes north south

    Attributes:
      folder: where the keys go; node keys go to its subfolder nodes. Existing files are never replaced.
      host: every name and address by which nodes reach the server.
      nodes: names of nodes to make keys for.
      tokens: make tokens.key, the secret with which your backend issues tokens to devices.
      helper: make helper.key and helper.pub, the keys of the second server of device sums. They belong to its operator,
        who is somebody else.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    host: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    tokens: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    helper: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


parse = partial(options.parse, Keys, "keys")


def run(args: Keys) -> int:
    """Make the keys and print where each belongs."""
    from fedrecon._src.core.checks import require
    from fedrecon._src.deploy import certificates

    require("cryptography")
    server = args.folder / "server.crt"
    if args.host and server.exists():
        raise options.UsageError(f"--host cannot be used: {server} already exists. Move it and its key away first.")
    # All is checked before anything is made.
    certificates.check_hosts(args.host)
    for name in args.nodes:
        certificates.check_node(args.folder / "nodes", name)
    if server.exists():
        certificates.check_server(server, args.folder / "server.key", args.folder / "ca.crt")
    if not (args.folder / "ca.crt").exists():
        print(f"{certificates.make_authority(args.folder)}: send it to every node; its key stays here")
    if not server.exists():
        print(f"{certificates.make_server(args.folder, args.host)}: for the server, with server.key")
    for name in dict.fromkeys(args.nodes):
        public = certificates.make_node(args.folder / "nodes", name)
        private = public.with_suffix(".key")
        print(f"{public}: for the server; {private} is for {name} only; send it over a secure channel")
    if args.tokens:
        print(f"{certificates.make_token_secret(args.folder)}: for the coordinator and your backend, nobody else")
    if args.helper:
        public = certificates.make_helper(args.folder)
        print(f"{public}: for whoever makes device plans: {public.read_text().strip()}; helper.key stays here")
    return 0
