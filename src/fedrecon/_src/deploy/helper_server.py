"""The second server of device sums, as an application of its own.

    GET  /v1/key                         its public key, as hexadecimal digits
    POST /v1/rounds/{n}/batches/{batch}  ids and sealed seeds; the answer says which are in the sum, and has the sum of
                                         their masks

A batch is asked for with the coordinator's signature (`admission`), and with `?run=RUN&broadcast=SHA256`: the training,
and what all devices of the batch were sent.
"""

from __future__ import annotations

import asyncio
import re

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fedrecon._src.deploy.admission import Verifier
from fedrecon._src.deploy.http_server import Limits, RequestError, Service, authenticate, round_number
from fedrecon._src.privacy.secure_sum.terms import MessageError, Refusal
from fedrecon._src.privacy.secure_sum.two_servers import Helper, TooFewReports
from fedrecon_device.sealing import RECORD

MOST_REPORTS = 100_000  # of a batch
LONGEST_RUN = 200  # characters of a run's name


class HelperApi(Service):
    """The helper's endpoints."""

    def __init__(self, helper: Helper, verifier: Verifier, limits: Limits | None = None):
        """Answer whoever the verifier knows."""
        self.helper, self.verifier = helper, verifier
        self._lock = asyncio.Lock()
        paths = {"get_key": "/v1/key", "post_batch": "/v1/rounds/{number}/batches/{batch}"}
        super().__init__(limits or Limits(RECORD * MOST_REPORTS), paths)

    async def get_key(self, request: Request) -> Response:
        """Return the public key to which devices seal."""
        return PlainTextResponse(self.helper.public.hex())

    async def post_batch(self, request: Request) -> Response:
        """Return the sum of the masks of a batch."""
        key, digest = authenticate(self.verifier, request)
        number, batch = round_number(request), request.path_params["batch"]
        run, broadcast = (request.query_params.get(name, "") for name in ("run", "broadcast"))
        if not re.fullmatch("[0-9a-f]{32}", batch) or not 1 <= len(run) <= LONGEST_RUN:
            raise RequestError(404, "no-batch", "a batch has 32 hexadecimal digits, and `run` names the training")
        if not re.fullmatch("[0-9a-f]{64}", broadcast):
            raise RequestError(404, "no-broadcast", "`broadcast` is the SHA-256 of what devices got, 64 digits")
        records = await self.read_body(request, key, digest)
        try:
            arguments = (run, number, bytes.fromhex(batch), records, broadcast)
            async with self._lock:
                answer = await run_in_threadpool(self.helper.answer, *arguments)
        except MessageError as error:
            raise RequestError(400, "garbage", str(error)) from None
        except (Refusal, TooFewReports) as error:
            kind = "refused" if isinstance(error, Refusal) else "too-few"
            raise RequestError(409, kind, str(error)) from None
        return Response(answer, media_type="application/octet-stream")
