"""Every table, chart and page that is made from committed result files. Needs nothing but Python.

    python bench/report.py            # writes them
    python bench/report.py --check    # names those that differ from the result files; exit status 1

Inputs: docs/lab/results/{cpu,gpu-forward,gpu-backward,gpu-models,gpu-models-shapes}.json. `python bench/gpu.py PART --json FILE` and
`cargo xtask bench` measure them.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import report_cpu_page
import report_gpu_page
from report_charts import comparison, rounded_down

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "lab" / "results"
NAMES = {"cudnn": "cuDNN", "fa4": "FlashAttention-4", "flex": "FlexAttention", "torch": "PyTorch", "openvino": "OpenVINO",
         "onnxruntime MHA": "ONNX Runtime"}  # fmt: skip
GRID_WORDS = "bf16, 16384 tokens, heads x dim 2048, contenders alternating in one process, medians"
PASSES = ("forward", "backward")


def load(name):
    return json.loads((RESULTS / name).read_text())


def mean(ratios):
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def ratio(row):
    """Ours over the best peer of a cell; None where no peer ran."""
    value = row.get("ratio")
    return value if value is not None and math.isfinite(value) else None


def best_peer(rates):
    """(name, rate) of the fastest contender besides ours."""
    return max(((name, rate) for name, rate in rates.items() if name != "ours"), key=lambda pair: pair[1], default=None)


def contenders(models):
    """The peers that ran, in words; a peer that is missing is named."""
    ran = {name for row in models for part in PASSES for name in row[part]["tflops"]} - {"ours"}
    *others, last = (NAMES[name] for name in ("cudnn", "fa4", "flex") if name in ran)
    words = f"{', '.join(others)} and {last}" if others else last
    return words if "fa4" in ran else f"{words} (FlashAttention-4 did not take part)"


def shape_words(text):
    """`Llama-3-8B 1 x 8192, 32/8, d 128` as (model, batch x length, heads, head dim, features)."""
    front, heads, dim, *features = text.split(", ")
    model, batch, _, length = front.rsplit(" ", 3)
    return model, f"{batch} x {length}", heads, dim.removeprefix("d "), ", ".join(features)


# ------------------------------------------------------------------------------------------------- GPU
def gpu_rates(cell):
    """`811 (cuDNN 610, 1.33x)`."""
    peer = best_peer(cell["tflops"])
    ours = f"{cell['tflops']['ours']:.0f}"
    return ours if peer is None else f"{ours} ({NAMES[peer[0]]} {peer[1]:.0f}, {rounded_down(ratio(cell))}x)"


def models_table(rows):
    lines = ["| model | batch x length | heads q/kv | head dim | features | forward | backward |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in rows:
        lines.append("| " + " | ".join([*shape_words(row["shape"]), *(gpu_rates(row[part]) for part in PASSES)]) + " |")
    return "\n".join(lines)


def drawn_table(rows):
    """Random shapes: the distribution of the ratios, and the slowest shape by name."""
    lines = ["| pass | geometric mean | smallest | median | largest | slower than the best peer | slowest shape |", "| --- |" + " --- |" * 6]
    for part in PASSES:
        pairs = sorted((ratio(row[part]), row["shape"].removeprefix("drawn ")) for row in rows if ratio(row[part]) is not None)
        found = [value for value, _ in pairs]
        slower = sum(value < 1 for value in found)
        lines.append(f"| {part} | {rounded_down(mean(found))} | {rounded_down(found[0])} | {rounded_down(found[len(found) // 2])} | {rounded_down(found[-1])} | "
                     f"{slower} of {len(found)} | {pairs[0][1]} |")  # fmt: skip
    return "\n".join(lines)


def grid_table(rows):
    """Ours, and in brackets the ratio to the best peer of the cell."""
    lengths = sorted({row["n"] for row in rows})
    lines = ["| | " + " | ".join(map(report_gpu_page.length, lengths)) + " | mean |", "| --- |" + " --- |" * (len(lengths) + 1)]
    for (d, causal), cells in report_gpu_page.panels(rows).items():
        by_length = {cell["n"]: f"{cell['tflops']['ours']:.0f} ({rounded_down(cell['ratio'])})" for cell in cells}
        lines.append(f"| {report_gpu_page.title(d, causal)} | " + " | ".join(by_length.get(n, "") for n in lengths)
                     + f" | {rounded_down(mean([cell['ratio'] for cell in cells]))} |")  # fmt: skip
    return "\n".join(lines)


def gpu_page(machine, models, drawn, grids):
    words = ", ".join(f"{key} {value}" for key, value in machine.items())
    parts = [
        "# Attention on a GPU: measured",
        f"{words}. TFLOP/s; in brackets the fastest peer of the same process that has the features, and our ratio to it. "
        "Causal runs are credited with the FLOPs of visible scores only.",
        "## Shapes of models",
        f"Causal, bf16. Peers: {contenders(models)}. `python bench/gpu.py models`.",
        models_table(models),
        "## Random shapes of models",
        "Odd lengths, grouped heads, other head dims. `python bench/gpu.py shapes --no-flex`.",
        drawn_table(drawn),
        "## Grid",
        f"{GRID_WORDS}. In brackets the ratio to the best of cuDNN and FlashAttention-4 in that cell. "
        "`python bench/gpu.py grid backward`. [Charts and errors](gpu.html).",
    ]
    for part, rows in zip(PASSES, grids):
        parts += [f"### {part.capitalize()}", f"Geometric mean of the ratios {rounded_down(mean([row['ratio'] for row in rows]))}.", grid_table(rows)]
    return "\n\n".join(parts) + "\n"


def spread(ratios):
    return f"{rounded_down(min(ratios))} to {rounded_down(max(ratios))}"


def gpu_readme(models, drawn, grids):
    ratios = {part: [ratio(row[part]) for row in models if ratio(row[part]) is not None] for part in PASSES}
    others = {part: [ratio(row[part]) for row in drawn] for part in PASSES}
    slower = {part: sum(value < 1 for value in others[part]) for part in PASSES}
    text = [
        models_table(models[:6]),
        f"NVIDIA H200, bf16, causal, TFLOP/s; in brackets the fastest of {contenders(models)}. Over {len(models)} models the ratio is "
        f"{spread(ratios['forward'])} forward and {spread(ratios['backward'])} "
        f"backward. Over {len(drawn)} random shapes its geometric mean is {rounded_down(mean(others['forward']))} and {rounded_down(mean(others['backward']))}, "
        f"its smallest {rounded_down(min(others['forward']))} and {rounded_down(min(others['backward']))}; {slower['forward']} and {slower['backward']} shapes are slower than the best peer. Over square problems, beside cuDNN and FlashAttention-4, "
        f"the mean is {rounded_down(mean([row['ratio'] for row in grids[0]]))} and {rounded_down(mean([row['ratio'] for row in grids[1]]))}. "
        "[All tables](docs/lab/results/gpu.md).",
    ]
    return "\n\n".join(text)


def gpu_chart(models):
    panels = []
    for part in PASSES:
        rows = []
        for row in models:
            peer = best_peer(row[part]["tflops"])
            rows.append((shape_words(row["shape"])[0], row[part]["tflops"]["ours"], peer and (NAMES[peer[0]], peer[1])))
        panels.append((part.capitalize(), rows))
    return comparison("H200, causal attention of models, bf16, TFLOP/s (longer is faster)", panels)


# ------------------------------------------------------------------------------------------------- CPU
def cpu_cells(record, part):
    """(cell, ours, peer, its rate) in GFLOP/s, medians."""
    for row in record["rows"]:
        if row["part"] == part:
            ours, peer = ("ours f32", row["ratio_to_median"]) if part == "forward" else ("ours", "torch")
            rate = lambda name: row["timings"][name]["median_gflops"]
            yield row["cell"], rate(ours), peer.split(" ")[0], rate(peer)


def cpu_chart(record):
    panels = []
    for part in PASSES:
        rows = []
        for cell, ours, peer, rate in cpu_cells(record, part):
            dim, tokens, mask = cell.split(" ")
            if mask == "causal":
                label = f"head dim {dim[1:]}, {report_gpu_page.length(int(tokens[1:]))}"
                rows.append((label, ours, (NAMES.get(peer, "ONNX Runtime"), rate)))
        panels.append((part.capitalize(), rows))
    return comparison(f"{cpu_name(record)}, causal attention, f32, GFLOP/s (longer is faster)", panels)


def cpu_name(record):
    cores = record["machine"]["cores"]
    return f"{record['machine']['cpu'].replace('(R)', '')}, {cores} cores"


def cpu_readme(record):
    ratios = {part: [ours / rate for _, ours, _, rate in cpu_cells(record, part)] for part in PASSES}
    missed = [line for line in record["summary"] if line["met"] is False]
    versions = record["versions"]
    words = ", ".join(f"{name} {versions[key]}" for key, name in
                      (("torch", "PyTorch"), ("onnxruntime", "ONNX Runtime"), ("openvino", "OpenVINO")))  # fmt: skip
    return (
        f"{cpu_name(record)} (AVX-512, AMX), f32, medians: forward {rounded_down(mean(ratios['forward']))} times the fastest of {words} over "
        f"{len(ratios['forward'])} cells (smallest {rounded_down(min(ratios['forward']))}), backward {rounded_down(mean(ratios['backward']))} times PyTorch (smallest "
        f"{rounded_down(min(ratios['backward']))}). {len(missed)} of {sum(line['met'] is not None for line in record['summary'])} of our own targets are missed. "
        "[All cells, targets, method](docs/lab/results/cpu.md)."
    )


# ------------------------------------------------------------------------------------------------- files
def between(text, name, part):
    """`text` with what lies between two markers replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"report.py: README.md has no markers `{begin}` and `{end}`")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n\n{part.strip()}\n\n{end}{rest.split(end, 1)[1]}"


def files():
    """Every generated file with its text."""
    cpu, models, drawn = load("cpu.json"), load("gpu-models.json"), load("gpu-models-shapes.json")["shapes"]["rows"]
    machine, models = models["machine"], models["models"]["rows"]
    grids = [load("gpu-forward.json")["grid"]["rows"], load("gpu-backward.json")["backward"]["rows"]]
    readme = (ROOT / "README.md").read_text()
    readme = between(readme, "gpu-results", gpu_readme(models, drawn, grids))
    readme = between(readme, "cpu-results", cpu_readme(cpu))
    return {
        ROOT / "README.md": readme,
        RESULTS / "cpu.md": report_cpu_page.markdown(cpu),
        RESULTS / "gpu.md": gpu_page(machine, models, drawn, grids),
        RESULTS / "gpu.html": report_gpu_page.page(load("gpu-forward.json")["machine"], zip(("Forward", "Backward"), grids)),
        RESULTS / "gpu-forward.svg": report_gpu_page.svg(grids[0], "Forward"),
        RESULTS / "chart-gpu.svg": gpu_chart(models),
        RESULTS / "chart-cpu.svg": cpu_chart(cpu),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = []
    for path, text in files().items():
        if path.exists() and path.read_text() == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(text)
    for name in stale:
        print(f"{name} {'differs from the result files; run `python bench/report.py`' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
