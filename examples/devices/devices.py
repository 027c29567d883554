"""Several devices in one process of Python, each with one person's ratings: python devices.py < settings.json

Settings: {"bundle": folder, "server": URL, "authority": certificate, "devices": [{"store": file, "token": text,
"ratings": {"item": ids, "rating": numbers}, "rounds": how many it reports before it leaves, null for all,
"stray": whether it answers for rounds that nobody asked it about}]}. SIGTERM ends it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

import httpx

from fedrecon_device import Bundle, Participant, ParticipationError


def take_part(participant: Participant, rounds: int | None, stop: threading.Event) -> None:
    """Take part until a device has reported so often, or is told to stop."""

    def over() -> bool:
        return stop.is_set() or (rounds is not None and len(participant.reports()) >= rounds)

    try:
        participant.run(over, stop.wait)
    except ParticipationError as problem:
        print(problem, file=sys.stderr)


def stray(settings: dict[str, Any], device: dict[str, Any], stop: threading.Event) -> None:
    """Send nonsense for the round after the one that was asked for, once a second."""
    headers = {"Authorization": f"Bearer {device['token']}"}
    with httpx.Client(base_url=settings["server"], headers=headers, verify=settings["context"]) as http:
        while not stop.wait(1):
            try:
                response = http.get("/v1/check-in")
                if response.status_code == 200:
                    task = response.json()
                    http.put(f"/v1/rounds/{task['round'] + 1}/reports/{task['ticket']}", content=b"nonsense")
            except httpx.HTTPError:
                continue


def main() -> None:
    """Run all devices."""
    import ssl

    settings = json.load(sys.stdin)
    settings["context"] = ssl.create_default_context(cafile=settings["authority"])
    bundle, stop = Bundle(settings["bundle"]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threads = []
    for device in settings["devices"]:
        participant = Participant(
            bundle, settings["server"], device["store"], token=device["token"], authority=settings["authority"]
        )
        participant.personal.add(**device["ratings"])
        work: Any = (
            (stray, settings, device, stop) if device["stray"] else (take_part, participant, device["rounds"], stop)
        )
        threads.append(threading.Thread(target=work[0], args=work[1:]))
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # so that signals are heard


if __name__ == "__main__":
    main()
