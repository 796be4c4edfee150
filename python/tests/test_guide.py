"""The code of the Python guide and of README runs, block after block, as a reader would run it."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "docs/guide/python.md",
    "docs/guide/migration.md",
    "docs/guide/neighbors.md",
    "docs/guide/distributed.md",
    "docs/guide/block-skipping.md",
    "docs/guide/gated-delta-rule.md",
    "docs/guide/lighthouse.md",
    "docs/guide/low-precision.md",
    "docs/guide/parallax.md",
    "README.md",
    "python/README.md",
]


def blocks(page):
    """(what it needs, line, code) of each block of Python."""
    text = (ROOT / page).read_text()
    for found in re.finditer(r"^```python *(\w*)\n(.*?)^```$", text, re.M | re.S):
        yield found[1], text[: found.start(2)].count("\n"), found[2]


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page):
    if not (ROOT / page).exists():
        pytest.skip("the tests were installed without the pages")
    names, ran, skipped = {}, 0, set()
    for needs, line, code in blocks(page):
        # What needs torch also needs what the blocks before it made, and those ran.
        if needs and (importlib.util.find_spec(needs) is None or importlib.util.find_spec("torch") is None):
            skipped.add(needs)
            continue
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)
        ran += 1
    assert ran > 0, f"nothing ran, skipped: {sorted(skipped)}"
