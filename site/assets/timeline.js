// A timeline on a canvas: zoom, drag, and a click that tells what an instruction is.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("chart"), detail = document.getElementById("detail");
  const ROW = 30, TOP = 22;
  const LEFT = () => (canvas.clientWidth < 600 ? 84 : 130);
  let from = 0, to = data.cycles, chosen = -1;
  // By name of the instruction; the first rule that fits gives colour and word.
  const KINDS = [
    ["wait", "waits", "--line"],
    [/^(product|wgmma|mma)/, "products", "--four"],
    [/^(copy|cp|ldmatrix|stmatrix|ld|st|red|fence|prefetch)/, "copies, loads, stores", "--one"],
    [/^(ex2|lg2|tanh|rcp)/, "exponentials", "--five"],
    [/^(mbarrier|bar|barrier|setmaxnreg|griddepcontrol|elect|vote|shfl|nanosleep)/, "barriers, exchanges", "--three"],
    [/./, "arithmetic", "--two"],
  ];
  const kindOf = (span) => KINDS.find(([rule]) => (rule === "wait" ? span[4] : rule.test(span[3])));
  const kinds = data.spans.map(kindOf);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  document.getElementById("legend").innerHTML = KINDS.map(
    ([, words, name]) => `<span class="swatch" style="background:var(${name})"></span>${words}`).join("");

  const x = (cycle) => LEFT() + ((cycle - from) / (to - from)) * (canvas.clientWidth - LEFT() - 8);
  const cycleAt = (px) => from + ((px - LEFT()) / (canvas.clientWidth - LEFT() - 8)) * (to - from);

  function draw() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = TOP + ROW * data.tracks.length + 6;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const ink = colour("--ink"), quiet = colour("--quiet"), line = colour("--line"), shades = new Map(KINDS.map((k) => [k, colour(k[2])]));
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillStyle = quiet;
    const step = Math.pow(10, Math.floor(Math.log10((to - from) / 3)));
    for (let tick = Math.ceil(from / step) * step, drawn = -1e9; tick <= to; tick += step) {
      if (x(tick) - drawn < 70) continue;
      drawn = x(tick);
      ctx.fillText(Math.round(tick) + (tick === 0 ? " cycles" : ""), drawn, 13);
      ctx.fillRect(drawn, TOP - 4, 1, height);
    }
    data.tracks.forEach((name, row) => {
      ctx.fillStyle = line;
      ctx.fillRect(0, TOP + ROW * row - 1, width, 1);
    });
    const last = new Array(data.tracks.length).fill(-1);
    data.spans.forEach((span, i) => {
      const [track, start, end] = span;
      if (end < from || start > to) return;
      const left = Math.max(LEFT(), x(start)), right = Math.min(width - 8, x(end));
      // Bars thinner than a third of a point beside each other are one.
      if (right - left < 0.35 && right - last[track] < 0.35 && i !== chosen) return;
      last[track] = right;
      ctx.fillStyle = shades.get(kinds[i]);
      ctx.fillRect(left, TOP + ROW * track + 3, Math.max(0.5, right - left), ROW - 8);
      if (i === chosen) {
        ctx.strokeStyle = ink;
        ctx.lineWidth = 2;
        ctx.strokeRect(left - 1, TOP + ROW * track + 2, Math.max(2, right - left) + 2, ROW - 6);
      }
    });
    data.tracks.forEach((name, row) => {
      ctx.fillStyle = colour("--page");
      ctx.fillRect(0, TOP + ROW * row, LEFT() - 2, ROW - 1);
      ctx.fillStyle = ink;
      ctx.fillText(name, 4, TOP + ROW * row + 19, LEFT() - 8);
    });
  }

  function view(first, last) {
    const length = Math.min(data.cycles, Math.max(20, last - first));
    from = Math.max(0, Math.min(first, data.cycles - length));
    to = from + length;
    draw();
  }
  const zoom = (by, at = (from + to) / 2) => view(at - (at - from) * by, at + (to - at) * by);

  function at(px, py) {
    const track = Math.floor((py - TOP) / ROW), cycle = cycleAt(px), slack = (to - from) / (canvas.clientWidth || 1) * 4;
    let best = -1, distance = Infinity;
    data.spans.forEach(([row, start, end], i) => {
      if (row !== track) return;
      const off = Math.max(start - cycle, cycle - end, 0) + (end - start) * 1e-6;
      if (off < distance && off <= slack) { best = i; distance = off; }
    });
    return best;
  }
  const text = (tag, words) => { const node = document.createElement(tag); node.textContent = words; return node; };
  function show(i) {
    chosen = i;
    draw();
    if (i < 0) { detail.replaceChildren(text("p", "No bar is there.")); return; }
    const [track, start, end, what, waits, number] = data.spans[i], line = data.lines[number], parts = [];
    parts.push(text("h2", `${what}, ${data.tracks[track]}`));
    parts.push(text("p", `cycles ${start} to ${end} (${end - start}), ${line.at}`));
    parts.push(text("pre", line.rust.join("\n") || "(no source)"));
    if (waits) {
      // Work elsewhere that ended last before this wait did: what it waited for, by this clock.
      const others = data.spans.filter((s) => s[0] !== track && !s[4] && s[2] > start && s[2] <= end + 1).sort((a, b) => b[2] - a[2]);
      const first = others.slice(0, 3);
      parts.push(text("p", first.length ? "Work of other rows that ended last before this wait did:" : "No other row ended work during this wait; it waits for a latency."));
      const list = document.createElement("ul");
      first.forEach((s) => {
        const item = document.createElement("li"), button = text("button", `${s[3]}, ${data.tracks[s[0]]}, ends at ${s[2]} (${data.lines[s[5]].at})`);
        button.addEventListener("click", () => show(data.spans.indexOf(s)));
        item.append(button);
        list.append(item);
      });
      parts.push(list);
    }
    parts.push(text("p", line.ptx.length ? "PTX of this line" + (line.more ? ` (${line.more} more forms)` : "") : "No PTX carries this line: it is cold code or belongs to the line before."));
    if (line.ptx.length) parts.push(text("pre", line.ptx.join("\n")));
    detail.replaceChildren(...parts);
  }

  let drag = null;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", (event) => { drag = { x: place(event)[0], from, to, moved: false }; });
  window.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const by = place(event)[0] - drag.x;
    if (Math.abs(by) > 4) drag.moved = true;
    if (drag.moved) {
      const cycles = (by / (canvas.clientWidth - LEFT() - 8)) * (drag.to - drag.from);
      view(drag.from - cycles, drag.to - cycles);
    }
  });
  window.addEventListener("pointerup", () => { setTimeout(() => { drag = null; }, 0); });
  canvas.addEventListener("click", (event) => { if (!drag || !drag.moved) show(at(...place(event))); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, cycleAt(place(event)[0]));
  }, { passive: false });
  const step = (by) => view(from + by * (to - from), to + by * (to - from));
  const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), ArrowLeft: () => step(-0.2), ArrowRight: () => step(0.2) };
  canvas.addEventListener("keydown", (event) => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } });
  const press = (id, act) => document.getElementById(id).addEventListener("click", act);
  press("in", () => zoom(0.6));
  press("out", () => zoom(1.6));
  press("all", () => view(0, data.cycles));
  press("left", () => step(-0.3));
  press("right", () => step(0.3));
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
