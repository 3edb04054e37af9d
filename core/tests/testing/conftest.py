"""Makes this folder's helpers importable, in this process and in those that the tests start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
