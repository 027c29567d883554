"""Let tests of the browser use the small models of the other tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
