"""Write requirements-dev.txt from a report of pip: every package of development with its version and its sha256.

    python -m pip install --dry-run --ignore-installed --report report.json -c constraints.txt ./src-device '.[dev]'
    python .ci/lock.py report.json requirements-dev.txt

The digests are those of the files that pip would install here: of one version of Python on one kind of machine.
"""

import json
import platform
import sys
from pathlib import Path

report, target = map(Path, sys.argv[1:])
lines = [
    f"# Development on Python {platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}, "
    f"{platform.system()} {platform.machine()}: made by make lock, to be installed with --require-hashes.",
]
for package in json.loads(report.read_text())["install"]:
    about, archive = package["metadata"], package["download_info"].get("archive_info", {})
    if "sha256" in archive.get("hashes", {}):  # not the two packages of this repository
        name = about["name"].lower().replace("_", "-").replace(".", "-")
        lines.append(f"{name}=={about['version']} --hash=sha256:{archive['hashes']['sha256']}")
target.write_text("\n".join([lines[0], *sorted(lines[1:])]) + "\n")
