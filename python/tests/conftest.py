"""The package is imported from this checkout; `python python/build.py` puts the extension there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
