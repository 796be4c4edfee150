"""The notebooks run, cell after cell, and are committed without outputs."""

import ast
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {
    "flex_attention_mask": ("torch",),
    "hugging_face": ("torch", "transformers"),
    "simulate_a_kernel": (),
}


def cells(name):
    path = ROOT / "examples" / "notebooks" / f"{name}.ipynb"
    if not path.exists():
        pytest.skip("the tests were installed without the notebooks")
    return json.loads(path.read_text())["cells"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_outputs(name):
    for cell in cells(name):
        assert cell["cell_type"] in ("markdown", "code") and cell["source"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, monkeypatch):
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    missing = [module for module in NOTEBOOKS[name] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if name == "simulate_a_kernel" and (os.environ.get("FULGURITE_LONG") != "1" or not shutil.which("cargo")):
        pytest.skip("builds the Rust examples: part of the long tests, with cargo")
    monkeypatch.chdir(ROOT / "examples" / "notebooks")
    names = {"__name__": "__main__"}
    for at, cell in enumerate(code):
        show(ast.parse("".join(cell["source"])), f"{name}, code cell {at + 1}", names)


def show(tree, place, names):
    """Runs a cell and, as a notebook does, shows its last expression."""
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), place, "eval"), names)
        if value is not None:
            print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
