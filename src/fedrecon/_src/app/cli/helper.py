"""`fedrecon helper`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from fedrecon._src.app.cli import options, show
from fedrecon._src.recommend.config import Rule


@dataclass(frozen=True, kw_only=True)
class Helper:
    """Run the second server of device sums, which opens masks and never sees a report.

    It needs another operator than the coordinator: together, the two can open every report.

    Example: fedrecon helper plan.json --key keys/helper.key --coordinator coordinator.pub --keys keys --state helper

    Attributes:
      plan: the device plan (plan.json), or the bundle that has it. Its sums are the only ones that are answered.
      key: the helper's private key; fedrecon keys --helper makes it.
      coordinator: the coordinator's public key (*.pub).
      state: the folder in which the helper remembers what it answered. Keep it as long as the key: without it, the
        helper would answer a round twice.
      listen: address and port.
      keys: the folder with server.crt, server.key and ca.crt; fedrecon keys makes them.
      insecure: use no encryption. Only for trials on one machine.
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    key: Path
    coordinator: Path
    state: Path
    listen: str = "127.0.0.1:8100"
    keys: Path | None = None
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        yield Rule((self.keys is None) != self.insecure, "keys", "is needed, or --insecure for trials on one machine")


parse = partial(options.parse, Helper, "helper")


def run(args: Helper) -> int:
    """Answer the coordinator until interrupted."""
    from fedrecon._src.deploy.admission import Verifier, read_registry
    from fedrecon._src.deploy.certificates import check_server, read_helper
    from fedrecon._src.deploy.helper_server import HelperApi
    from fedrecon._src.deploy.http_server import Tls, parse_address, run_service
    from fedrecon._src.privacy.secure_sum.two_servers import Helper as Answers
    from fedrecon._src.privacy.secure_sum.two_servers import read_served_plan
    from fedrecon._src.storage.ownership import LOCK, file_lock

    plan, address, tls = read_served_plan(args.plan), parse_address(args.listen), None
    if args.keys is None:
        show.alarm("--insecure: nothing is encrypted")
    else:
        tls = Tls(args.keys / "server.crt", args.keys / "server.key", args.keys / "ca.crt")
        check_server(*tls)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C
    args.state.mkdir(parents=True, exist_ok=True)
    with file_lock(args.state / LOCK, f"what the helper remembers in {args.state}"):
        api = HelperApi(Answers(plan, read_helper(args.key), args.state), Verifier(read_registry(args.coordinator)))
        with run_service(api, address, tls), contextlib.suppress(KeyboardInterrupt):
            show.remark(f"plan {plan.digest}; sums of {plan.least} reports or more, asked for at {args.listen}")
            threading.Event().wait()
    return 0
