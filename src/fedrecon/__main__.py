"""`python -m fedrecon` is the command `fedrecon`."""

import sys

from fedrecon._src.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
