"""`python -m fedrecon.app.cli` is the command `fedrecon`."""

import sys

from fedrecon.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
