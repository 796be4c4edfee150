"""The package itself: what it exports, what it says, its commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fulgurite

HERE = Path(fulgurite.__file__).parent


def test_exports():
    for name in fulgurite.__all__:
        thing = getattr(fulgurite, name)
        assert not callable(thing) or thing.__doc__, f"{name} has no docstring"
    assert (HERE / "py.typed").exists() and (HERE / "_fulgurite.pyi").exists()


def test_stub_names_what_the_extension_has():
    stub = (HERE / "_fulgurite.pyi").read_text()
    for name in dir(fulgurite._fulgurite):
        assert name.startswith("__") or f"def {name}(" in stub or f"class {name}:" in stub, name


def test_importing_does_not_import_torch():
    code = "import fulgurite, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parent)


def command(*arguments):
    run = [sys.executable, "-m", "fulgurite", *arguments]
    return subprocess.run(run, capture_output=True, text=True, cwd=HERE.parent)


def test_doctor():
    shown = command("doctor")
    assert "not here yet" not in shown.stdout and "\ngpu  " in shown.stdout
    assert shown.returncode == 0 and "runs it, the fastest on this machine that can" in shown.stdout
    assert json.loads(command("doctor", "--json").stdout)["versions"]["fulgurite"] == fulgurite.__version__
    refused = command("doctor", "--engine", "mmx")
    assert refused.returncode == 2 and refused.stderr.startswith('fulgurite: `engine` is "mmx", allowed: best, cpu,')


def test_bench():
    shown = json.loads(command("bench", "--seconds", "0.01", "--sequences", "64", "--json").stdout)
    assert [row["causal"] for row in shown["rows"]] == [False, True]
    assert all(row["ours"] > 0 for row in shown["rows"])


def test_check():
    shown = command("check", "--dtypes", "f32")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "0 comparisons outside the tolerance" in shown.stdout


@pytest.mark.parametrize(
    "word", ["", "sub score", "add score i1 i2", "frobnicate score", "load t", "load t 9 q", "i99999999999"]
)
def test_descriptions_of_strangers(word):
    """The operators of torch take a description as text: what is not one is refused."""
    with pytest.raises(ValueError):
        fulgurite._fulgurite.Description(f"score {word}")


@pytest.mark.parametrize(
    "text", ["nothing", "with nothing", "with aux", "window 1", "causal", "scale x", "blocks 1", "threads"]
)
def test_entries_of_strangers(text):
    with pytest.raises(ValueError):
        fulgurite._fulgurite.Description(text)


def test_deep_descriptions_do_not_overflow_the_stack():
    with pytest.raises(ValueError, match="nested more than"):
        fulgurite._fulgurite.Description("score " + "neg " * 1_000_000 + "score")
