"""Devices of one process, without JAX: `python devices_program.py SETTINGS.json`; see test_devices_loopback.py."""

import http.client
import json
import sys
import time
from pathlib import Path

from fedrecon_device import Participant


def main(path):
    about = json.loads(Path(path).read_text())
    devices = {}
    for name, token in about["tokens"].items():
        store = Path(about["stores"]) / f"{name}.json"
        device = Participant(about["bundle"], about["server"], store, token=token, authority=about["authority"])
        device.personal.add(about["examples"][name])
        devices[name] = device
    end = time.monotonic() + about["seconds"]
    left = set()  # devices that are gone
    while time.monotonic() < end and not Path(about["stop"]).exists():
        for name, device in devices.items():
            if name in left:
                continue
            try:
                if name == "leaver":  # asks, and is never heard again
                    device._request("GET", "/v1/check-in", 2**16)
                    left.add(name)
                elif name == "liar":  # answers for another round, and with what nobody can open
                    task = json.loads(device._request("GET", "/v1/check-in", 2**16)[2] or b"{}")
                    if task:
                        path = f"/v1/rounds/{{}}/reports/{task['ticket']}"
                        wrong = device._request("PUT", path.format(task["round"] + 1), 2**16, b"x")[0]
                        right = device._request("PUT", path.format(task["round"]), 2**16, bytes(about["bytes"]))[0]
                        assert (wrong, right) in ((404, 201), (404, 410))
                else:
                    device.step()
            except (OSError, http.client.HTTPException):
                pass
        time.sleep(1)  # no more often, or the coordinator refuses what follows a check-in
    assert "jax" not in sys.modules


if __name__ == "__main__":
    main(sys.argv[1])
