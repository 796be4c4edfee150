"""The package is imported from this checkout; `python python/build.py` puts the extension there.

`FULGURITE_INSTALLED=1` tests the installed wheel instead.
"""

import os
import sys
from pathlib import Path

if os.environ.get("FULGURITE_INSTALLED") != "1":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest  # noqa: E402  (after the path)


@pytest.fixture
def judged():
    """Judges every call of the test by the tolerance rule."""
    from judge import judged

    with judged():
        yield


@pytest.fixture(scope="session")
def pool():
    """Processes of a gloo group, for tests of `fulgurite.distributed`."""
    from ranks import Pool

    made = Pool()
    yield made
    made.close()
