// Products, exponentials and bytes of a problem beside the rates of an H200.
"use strict";
(function () {
  const machine = JSON.parse(document.getElementById("data").textContent), get = (id) => document.getElementById(id);
  const fail = (text) => { throw new Error(text); };
  const whole = (id, least, most, hint) => {
    const value = Number(get(id).value);
    if (get(id).value === "" || !Number.isInteger(value) || value < least || value > most) fail(`\`${id}\` is ${get(id).value || "empty"}, allowed: ${least} to ${most}${hint || ""}`);
    return value;
  };
  // Visible pairs of one head: the last query sees the last key.
  function visible(q_len, k_len, causal, window) {
    let pairs = 0;
    for (let i = 0; i < q_len; i++) {
      const at = i + k_len - q_len, last = causal ? Math.min(at, k_len - 1) : k_len - 1, first = window === null ? 0 : Math.max(0, at - window);
      pairs += Math.max(0, last - first + 1);
    }
    return pairs;
  }
  function problem() {
    const p = { batch: whole("batch", 1, 65536), q_len: whole("q_len", 1, 1 << 20), k_len: whole("k_len", 1, 1 << 20), head_dim: whole("head_dim", 1, 512) };
    p.heads = whole("heads", 1, 4096);
    p.kv_heads = whole("kv_heads", 1, 4096);
    if (p.heads % p.kv_heads) fail(`\`heads\`: ${p.heads} query heads over ${p.kv_heads} key/value heads, allowed: at least 1 each, query heads a multiple of key/value heads; repeat or drop heads of q`);
    const window = get("window").value.trim();
    if (window !== "" && !/^\d+$/.test(window)) fail(`\`window\` is ${JSON.stringify(window)}, allowed: a whole number of keys, or empty for an unbounded side`);
    p.pairs = visible(p.q_len, p.k_len, get("causal").checked, window === "" ? null : Number(window)) * p.batch * p.heads;
    p.backward = get("pass").value === "backward";
    return p;
  }
  const unit = (value, names) => { let n = 0; while (value >= 1000 && n + 1 < names.length) { value /= 1000; n++; } return value.toPrecision(3) + " " + names[n]; };
  const time = (seconds) => (seconds >= 1e-3 ? (seconds * 1e3).toPrecision(3) + " ms" : (seconds * 1e6).toPrecision(3) + " us");

  function run() {
    try {
      const p = problem(), q = 2 * p.batch * p.q_len * p.heads * p.head_dim, kv = 2 * p.batch * p.k_len * p.kv_heads * p.head_dim;
      const flops = (p.backward ? 10 : 4) * p.pairs * p.head_dim, bytes = p.backward ? 4 * q + 4 * kv : 2 * q + 2 * kv;
      const parts = [
        ["products", flops, flops / (machine.tensor_tflops * 1e12), unit(flops, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])],
        ["exponentials", p.pairs, p.pairs / machine.exponentials_per_second, unit(p.pairs, ["", "thousand", "million", "billion", "trillion"])],
        ["memory", bytes, bytes / machine.bytes_per_second, unit(bytes, ["B", "kB", "MB", "GB", "TB"])],
      ].sort((a, b) => b[2] - a[2]);
      const longest = parts[0][2];
      if (longest === 0) fail("no query sees a key; every row is 0 and its LSE is -inf");
      get("result").innerHTML = "<div class=\"wide\"><table><thead><tr><th>unit</th><th>work</th><th>at least</th><th>share of the bound</th></tr></thead><tbody>"
        + parts.map(([name, , seconds, work]) => `<tr><td>${name}</td><td>${work}</td><td>${time(seconds)}</td><td>${((100 * seconds) / longest).toFixed(0)} %</td></tr>`).join("")
        + `</tbody></table></div><p>Bound by <strong>${parts[0][0]}</strong>: ${time(longest)}, ${(flops / longest / 1e12).toPrecision(3)} TFLOP/s. `
        + "Exponentials and products overlap in a good kernel; where their shares are close, neither can be hidden completely.</p>";
      plot(flops / bytes, flops / longest / 1e12);
      get("error").textContent = "";
    } catch (error) {
      get("error").textContent = error.message;
      get("result").replaceChildren();
      get("plot").replaceChildren();
    }
  }
  // FLOP per byte against TFLOP/s, both by powers of ten.
  function plot(intensity, rate) {
    const x = (v) => 60 + (Math.log10(v) + 1) * 110, y = (v) => 300 - (Math.log10(v) + 1) * 65;
    const ridge = (machine.tensor_tflops * 1e12) / machine.bytes_per_second, line = "stroke=\"var(--line)\"", ink = "fill=\"var(--ink)\" font-size=\"12\"", quiet = "fill=\"var(--quiet)\" font-size=\"12\"";
    let out = "";
    for (let e = -1; e <= 4; e++) out += `<line ${line} x1="${x(10 ** e)}" x2="${x(10 ** e)}" y1="20" y2="300"/><text ${quiet} x="${x(10 ** e)}" y="316" text-anchor="middle">${10 ** e}</text>`;
    for (let e = -1; e <= 3; e++) out += `<line ${line} x1="60" x2="610" y1="${y(10 ** e)}" y2="${y(10 ** e)}"/><text ${quiet} x="54" y="${y(10 ** e) + 4}" text-anchor="end">${10 ** e}</text>`;
    const roof = (v) => Math.min(machine.tensor_tflops, (v * machine.bytes_per_second) / 1e12), left = 0.1;
    out += `<polyline fill="none" stroke="var(--one)" stroke-width="2" points="${x(left)},${y(roof(left))} ${x(ridge)},${y(machine.tensor_tflops)} 610,${y(machine.tensor_tflops)}"/>`;
    const at = Math.min(5e4, Math.max(left, intensity)), high = Math.max(0.1, rate);
    out += `<circle cx="${Math.min(606, x(at))}" cy="${y(high)}" r="6" fill="var(--two)"/><text ${ink} x="${Math.min(500, x(at) - 30)}" y="${Math.min(290, y(high) + 22)}">${rate.toPrecision(3)} TFLOP/s</text>`;
    out += `<text ${quiet} x="335" y="334" text-anchor="middle">FLOP for each byte of memory</text><text ${quiet} x="64" y="14">TFLOP/s</text>`;
    get("plot").innerHTML = out;
  }
  get("rates").textContent = `${machine.tensor_tflops.toFixed(0)} TFLOP/s of bf16, ${(machine.exponentials_per_second / 1e12).toFixed(2)} trillion exponentials and ${(machine.bytes_per_second / 1e12).toFixed(1)} TB a second`;
  document.querySelectorAll("main input, main select").forEach((node) => node.addEventListener("input", run));
  run();
})();
