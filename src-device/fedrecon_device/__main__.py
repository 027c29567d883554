"""`python -m fedrecon_device check DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedrecon_device.check import check
from fedrecon_device.errors import BundleError


def main(argv: Sequence[str] | None = None) -> int:
    """Check a bundle: 0 if it is whole and gives the numbers it promises, 1 if not, 2 for wrong use."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 2 or args[0] != "check":
        print("usage: python -m fedrecon_device check DIR", file=sys.stderr)
        return 2
    try:
        result = check(args[1])
    except BundleError as problem:
        print(f"fedrecon_device: {problem}", file=sys.stderr)
        return 1
    print(
        f"{args[1]}: {result.files} files as in the manifest; {result.vectors} test vectors, "
        f"largest difference {result.difference:.1e}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
