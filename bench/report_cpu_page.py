"""The tables of docs/lab/results/cpu.md from the record that bench/cpu.py writes: a part of it and of bench/report.py."""

import textwrap

from report_charts import rounded_down


def table(header, rows):
    line = lambda cells: "| " + " | ".join(cells) + " |\n"
    return line(header) + line(["---"] * len(header)) + "".join(map(line, rows)) + "\n"


def shown(line):
    """The value with two digits, or as many as it takes to tell it from a target that it misses."""
    value, digits = line["value"], 2
    target = float(line["bar"].split()[-1]) if line["bar"] else None
    while line["met"] is False and digits < 6 and float(f"{value:.{digits}f}") == target:
        digits += 1
    return f"{value:.{digits}f}"


def markdown(record):
    """The tables of docs/lab/results/cpu.md."""
    rows, of = record["rows"], lambda part: [row for row in record["rows"] if row["part"] == part]
    here = record["machine"]
    setting = f"{here['cpu']}, {here['cores']} cores, {record['threads']} threads, "
    setting += f"{', '.join(here.get('flags', []))}. Commit {record['commit']}. "
    setting += ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    setting += f". `{record['command']}`. Steal {record['steal']:.1%}."
    setting = textwrap.fill(setting, 150, break_long_words=False, break_on_hyphens=False)
    text = f"# CPU comparison, {record['date']}\n\n{setting}\n\n"
    text += "Speeds are medians, in brackets by the minimum time (\"by bests\"); ratios likewise. CPUs: processor time over wall time.\n\n"
    both = lambda row, key: f"{rounded_down(row[key + '_median'])} ({rounded_down(row[key + '_best'])})"
    speed = lambda t, unit: f"{t['median_' + unit]:.1f} ({t['best_' + unit]:.1f})"
    if of("forward"):
        text += "## Forward, f32, GFLOP/s\n\n"
        text += "Share: of the matrix product beside it; heads inside: the same for tensors `[batch, sequence, heads, dim]`.\n\n"
        header = "cell, ours, best peer, which, ratio, matmul, share, heads inside, bf16/f32, f16/f32, CPUs, steal"
        text += table(header.split(", "), [
            [r["cell"], speed(r["timings"]["ours f32"], "gflops"), speed(r["timings"][r["ratio_to_median"]], "gflops"),
             r["ratio_to_median"], both(r, "ratio"), speed(r["timings"][r["share_to_median"]], "gflops"),
             both(r, "share"), both(r, "inside") if "inside_median" in r else "-", both(r, "bf16"), both(r, "f16"), f"{r['timings']['ours f32']['cpus']:.2f}",
             f"{r['steal']:.0%}"] for r in of("forward")
        ])  # fmt: skip
    if of("backward"):
        text += "## Backward, f32, GFLOP/s\n\n"
        text += table(["cell", "ours", "torch", "ratio", "CPUs", "steal"], [
            [r["cell"], *(speed(r["timings"][name], "gflops") for name in ("ours", "torch")), both(r, "ratio"),
             f"{r['timings']['ours']['cpus']:.2f}", f"{r['steal']:.0%}"] for r in of("backward")
        ])  # fmt: skip
    if of("decode"):
        text += "## Decode, GB/s of K and V: 1 query, 32 query heads over 8, head dim 128, 8192 keys\n\n"
        names = ["ours", "read", "torch sum", "torch gqa", "torch folded"]
        text += table(["cell", *names, "ours/read", "steal"], [
            [r["cell"], *(speed(r["timings"][name], "gbs") for name in names), both(r, "ratio"), f"{r['steal']:.0%}"]
            for r in of("decode")
        ])  # fmt: skip
    if of("memory"):
        text += "## Memory at 32768 tokens, 1 head, head dim 64\n\n"
        text += table(["call", "beside inputs and outputs, MiB", "inputs and outputs, MiB"], [
            [r["cell"], f"{r['extra_mib']:.1f}", f"{r['inputs_outputs_bytes'] / 2**20:.1f}"] for r in of("memory")
        ])  # fmt: skip
    text += "## Summary\n\n"
    text += table(["what", "value", "target", "met"], [
        [line["what"], shown(line), line["bar"] or "-",
         "-" if line["met"] is None else ("yes" if line["met"] else "**no**")] for line in record["summary"]
    ])  # fmt: skip
    for row in of("matmul"):
        products = ", ".join(f"{name} {speed(t, 'gflops')}" for name, t in row["timings"].items())
        text += f"Matrix products, f32, GFLOP/s: {products}.\n\n"
    if record["problems"]:
        text += "## Problems\n\n" + "".join(f"- {problem}\n" for problem in record["problems"])
    return text.rstrip() + "\n"
