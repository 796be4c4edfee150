// The mask playground: a small parser of Python expressions, their evaluation over all pairs, and the tiles that remain.
"use strict";
(function () {
  const get = (id) => document.getElementById(id);
  const PRESETS = [
    ["causal", "j <= i"],
    ["causal, counted from the end", "j <= i + k_len - q_len"],
    ["sliding window of 256 keys", "(j <= i) & (i - j < 256)"],
    ["window and the first 4 keys", "(j <= i) & ((i - j < 256) | (j < 4))"],
    ["documents of 300 tokens", "(i // 300 == j // 300) & (j <= i)"],
    ["prefix of 200 keys", "(j < 200) | (j <= i)"],
    ["dilated: every 4th key", "(j <= i) & ((i - j) % 4 == 0)"],
    ["blocks at powers of two", "(j <= i) & (((i // 64 - j // 64) & (i // 64 - j // 64 - 1)) == 0)"],
    ["ALiBi, weights below e^-20 hidden", "where((j <= i) & (score - (i - j) / 8 > -20), score - (i - j) / 8, -inf)"],
  ];
  const NAMES = { i: "i", q_idx: "i", j: "j", kv_idx: "j", b: "0", h: "0", q_len: "ql", k_len: "kl", score: "0", inf: "Infinity" };
  const FUNCTIONS = { abs: 1, floor: 1, exp: 1, log: 1, sqrt: 1, tanh: 1, min: 2, max: 2, where: 3 };
  const ALLOWED = "allowed: " + Object.keys(NAMES).join(", ") + "; " + Object.keys(FUNCTIONS).join(", ");
  const fail = (text) => { throw new Error(text); };

  function tokens(text) {
    const found = [], rule = /\s*(?:(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)|([A-Za-z_][A-Za-z_0-9]*)|(\*\*|\/\/|<<|>>|<=|>=|==|!=|[-+*/%<>&|^~(),]))/giy;
    let at = 0;
    while (at < text.trimEnd().length) {
      rule.lastIndex = at;
      const match = rule.exec(text);
      if (!match) fail(`\`text\` has ${JSON.stringify(text.slice(at).trim()[0])} at ${at + 1}, allowed: an expression of Python; ${ALLOWED}`);
      if (["and", "or", "not"].includes(match[2])) fail(`\`${match[2]}\` cannot be traced; allowed: &, | and ~, with parentheses around comparisons`);
      found.push({ number: match[1], name: match[2], sign: match[3], at: rule.lastIndex });
      at = rule.lastIndex;
    }
    return found;
  }

  // What a name is called in a Python function for torch tensors; lengths are numbers there.
  const PYTHON = { where: "torch.where", min: "torch.minimum", max: "torch.maximum", floor: "torch.floor", exp: "torch.exp", log: "torch.log", sqrt: "torch.sqrt", tanh: "torch.tanh", inf: 'float("inf")', q_idx: "i", kv_idx: "j" };
  const python = (text, { ql, kl }) => text.trim().replace(/[A-Za-z_][A-Za-z_0-9]*/g, (word, at, all) => {
    if (/[0-9.]/.test(all[at - 1] || "")) return word; // the exponent of a number
    const known = { ...PYTHON, q_len: `${ql}`, k_len: `${kl}` };
    return Object.hasOwn(known, word) ? known[word] : word;
  });

  // Python's order of operators, loosest first.
  const LEVELS = [["<", ">", "<=", ">=", "==", "!="], ["|"], ["^"], ["&"], ["<<", ">>"], ["+", "-"], ["*", "/", "//", "%"]];

  // Each part is {js, bool}: text of JavaScript made from checked pieces alone, and whether it is a condition.
  function parse(text) {
    const all = tokens(text);
    let next = 0, depth = 0;
    const peek = () => all[next] && (all[next].sign || all[next].name);
    const want = (sign) => { if (peek() !== sign) fail(`\`text\` ends or goes on where \`${sign}\` is missing, at ${next < all.length ? all[next].at : text.length}; allowed: balanced parentheses and complete operators`); next++; };
    const both = (sign, a, b, bool) => { if (a.bool !== bool || b.bool !== bool) fail(`\`${sign}\` joins ${a.bool ? "a condition" : "a number"} and ${b.bool ? "a condition" : "a number"}, allowed: two ${bool ? "conditions" : "numbers"}; compare first, and use parentheses around comparisons`); };
    function level(n) {
      if (++depth > 2000) fail("`text` is nested too deeply, allowed: 100 levels; index a table instead");
      try {
        if (n === LEVELS.length) return unary();
        let a = level(n + 1), compared = false;
        while (LEVELS[n].includes(peek())) {
          const sign = all[next++].sign || all[next - 1].name, b = level(n + 1);
          if (n === 0 && compared) fail("`text` compares three values at once, allowed: two; write (a < b) & (b < c)");
          compared = true;
          a = join(sign, a, b);
        }
        return a;
      } finally { depth--; }
    }
    function join(sign, a, b) {
      if ("&|^".includes(sign)) {
        both(sign, a, b, a.bool);
        if (!a.bool) return { js: `(${a.js} ${sign} ${b.js})`, bool: false };
        return { js: sign === "^" ? `(${a.js} !== ${b.js})` : `(${a.js} ${sign}${sign} ${b.js})`, bool: true };
      }
      both(sign, a, b, false);
      if (["<", ">", "<=", ">=", "==", "!="].includes(sign)) return { js: `(${a.js} ${sign === "==" ? "===" : sign === "!=" ? "!==" : sign} ${b.js})`, bool: true };
      if (sign === "//") return { js: `Math.floor(${a.js} / ${b.js})`, bool: false };
      if (sign === "%") return { js: `mod(${a.js}, ${b.js})`, bool: false };
      return { js: `(${a.js} ${sign} ${b.js})`, bool: false };
    }
    function unary() {
      const sign = peek();
      if (sign === "-" || sign === "+" || sign === "~") {
        next++;
        const a = unary();
        if (sign === "~") return { js: a.bool ? `(!${a.js})` : `(~${a.js})`, bool: a.bool };
        if (a.bool) fail(`\`${sign}\` is before a condition, allowed: a number; use ~ to negate a condition`);
        return { js: `(${sign}${a.js})`, bool: false };
      }
      const a = atom();
      if (peek() !== "**") return a;
      next++;
      const b = unary();
      both("**", a, b, false);
      return { js: `Math.pow(${a.js}, ${b.js})`, bool: false };
    }
    function atom() {
      const one = all[next++];
      if (!one) fail("`text` ends too early, allowed: a complete expression, such as j <= i");
      if (one.number !== undefined) return { js: `${parseFloat(one.number)}`, bool: false };
      if (one.sign === "(") { const a = level(0); want(")"); return a; }
      if (one.name === undefined) fail(`\`text\` has \`${one.sign}\` at ${one.at}, allowed there: a number, a name or a parenthesis`);
      if (one.name === "True" || one.name === "False") return { js: one.name.toLowerCase(), bool: true };
      if (Object.hasOwn(NAMES, one.name)) return { js: NAMES[one.name], bool: false };
      if (!Object.hasOwn(FUNCTIONS, one.name)) fail(`\`${one.name}\` cannot be traced; ${ALLOWED}`);
      want("(");
      const args = [level(0)];
      while (peek() === ",") { next++; args.push(level(0)); }
      want(")");
      if (args.length !== FUNCTIONS[one.name]) fail(`\`${one.name}\` has ${args.length} arguments, allowed: ${FUNCTIONS[one.name]}`);
      if (one.name === "where") {
        if (!args[0].bool) fail("`where` begins with a number, allowed: a condition");
        both("where", args[1], args[2], args[1].bool);
        return { js: `(${args[0].js} ? ${args[1].js} : ${args[2].js})`, bool: args[1].bool };
      }
      args.forEach((a) => { if (a.bool) fail(`\`${one.name}\` has a condition as argument, allowed: numbers`); });
      return { js: `Math.${one.name}(${args.map((a) => a.js).join(", ")})`, bool: false };
    }
    if (all.length === 0) fail("`text` is empty, allowed: an expression, such as j <= i");
    const whole = level(0);
    if (next < all.length) fail(`\`text\` goes on with \`${peek() || all[next].number}\` at ${all[next].at}, allowed: one expression`);
    const score = all.some((one) => one.name === "score");
    if (!whole.bool && !score) fail("`text` gives a number, allowed: a condition (True keeps the key), or an expression of `score`");
    return { ...whole, score };
  }

  function size(id, most) {
    const value = Number(get(id).value);
    if (!Number.isInteger(value) || value < 1 || value > most) fail(`\`${id}\` is ${get(id).value || "empty"}, allowed: 1 to ${most}`);
    return value;
  }

  function draw(kinds, rows, cols) {
    const canvas = get("picture"), ratio = window.devicePixelRatio || 1;
    const room = getComputedStyle(canvas.parentElement), inner = canvas.parentElement.clientWidth - parseFloat(room.paddingLeft) - parseFloat(room.paddingRight);
    const width = Math.min(inner, 640), height = Math.max(20, Math.min(width * 1.5, (width * rows) / cols));
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const ctx = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colours = ["--line", "--two", "--one"].map((name) => style.getPropertyValue(name));
    const w = canvas.width / cols, h = canvas.height / rows, gap = Math.min(w, h) > 6 ? 1 : 0;
    kinds.forEach((kind, i) => {
      ctx.fillStyle = colours[kind];
      ctx.fillRect((i % cols) * w, Math.floor(i / cols) * h, w - gap, h - gap);
    });
  }

  let drawn = null;
  function run() {
    try {
      const ql = size("q_len", 4096), kl = size("k_len", 4096), th = size("rows", 4096), tw = size("cols", 4096), dim = size("dim", 512);
      const text = get("text").value, found = parse(text);
      const visible = found.bool ? found.js : `!(${found.js} === -Infinity)`;
      const mod = "const mod = (a, b) => a - b * Math.floor(a / b);";
      // One call counts the visible pairs of a tile.
      const count = new Function("i0", "i1", "j0", "j1", "ql", "kl",
        `"use strict"; ${mod} let n = 0; for (let i = i0; i < i1; i++) for (let j = j0; j < j1; j++) if (${visible}) n++; return n;`);
      const rows = Math.ceil(ql / th), cols = Math.ceil(kl / tw);
      if (rows * cols > 1 << 20) fail(`there are ${rows * cols} tiles, allowed: ${1 << 20}; choose larger tiles`);
      const kinds = [], sums = [0, 0, 0];
      let pairs = 0, computed = 0;
      for (let r = 0; r < rows; r++) {
        for (let c = 0; c < cols; c++) {
          const i1 = Math.min(ql, (r + 1) * th), j1 = Math.min(kl, (c + 1) * tw), all = (i1 - r * th) * (j1 - c * tw);
          const n = count(r * th, i1, c * tw, j1, ql, kl), kind = n === 0 ? 0 : n === all ? 2 : 1;
          kinds.push(kind);
          sums[kind]++;
          pairs += n;
          if (kind) computed += all;
        }
      }
      drawn = [kinds, rows, cols];
      draw(...drawn);
      const share = (n, of) => ((100 * n) / of).toFixed(1) + " %", giga = (n) => ((4 * dim * n) / 1e9).toFixed(3);
      const line = (name, value) => `<tr><th>${name}</th><td>${value}</td></tr>`;
      const tiles = rows * cols;
      get("result").innerHTML = "<div class=\"wide\"><table><tbody>"
        + line("full tiles", `${sums[2]} of ${tiles}`) + line("partial tiles", `${sums[1]} of ${tiles}`) + line("skipped tiles", `${sums[0]} of ${tiles}`)
        + line("visible pairs", share(pairs, ql * kl)) + line("GFLOP of a head, forward", `${giga(computed)} of ${giga(ql * kl)} without a mask`)
        + line("FLOPs saved", share(ql * kl - computed, ql * kl)) + "</tbody></table></div>";
      const name = found.bool ? "mask_mod=lambda b, h, i, j: " : "score_mod=lambda score, b, h, i, j: ";
      get("python").textContent = `fulgurite.attention(q, k, v, ${name}${python(text, { ql, kl })})`;
      get("error").textContent = "";
    } catch (error) {
      get("error").textContent = error.message;
      get("result").replaceChildren();
      get("python").textContent = "";
    }
  }

  PRESETS.forEach(([name, text]) => get("preset").append(new Option(name, text)));
  get("text").value = PRESETS[2][1];
  get("preset").selectedIndex = 2;
  get("preset").addEventListener("change", () => { get("text").value = get("preset").value; run(); });
  ["text", "q_len", "k_len", "rows", "cols", "dim"].forEach((id) => get(id).addEventListener("input", run));
  const redraw = () => { if (drawn) draw(...drawn); };
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  run();
})();
