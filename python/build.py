"""Builds the extension and puts it beside the Python package, without maturin.

    python python/build.py [--debug]      then: PYTHONPATH=python python -c "import fulgurite"

`build()` does the same from another script; cargo's own arguments can be passed on.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = {"win32": "_fulgurite.dll", "darwin": "lib_fulgurite.dylib"}


def build(profile="release", cargo_args=()):
    """Returns the path of the extension, built and in place."""
    flags = ["--release"] if profile == "release" else []
    cargo = os.environ.get("CARGO", "cargo")
    subprocess.run([cargo, "build", "--package", "fulgurite-python", *flags, *cargo_args], cwd=HERE.parent, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    library = HERE.parent / target / profile / LIBRARIES.get(sys.platform, "lib_fulgurite.so")
    place = HERE / "fulgurite" / ("_fulgurite.pyd" if sys.platform == "win32" else "_fulgurite.abi3.so")
    # Not in place: a process that has the old file mapped must keep it.
    fresh = place.with_name(place.name + ".new")
    shutil.copyfile(library, fresh)
    os.replace(fresh, place)
    return place


if __name__ == "__main__":
    arguments = sys.argv[1:]
    profile = "debug" if "--debug" in arguments else "release"
    try:
        print(build(profile, [a for a in arguments if a != "--debug"]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
