"""The package is imported from this checkout; `python python/build.py` puts the extension there.

`FULGURITE_INSTALLED=1` tests the installed wheel instead.
"""

import os
import sys
from pathlib import Path

if os.environ.get("FULGURITE_INSTALLED") != "1":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
