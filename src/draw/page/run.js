// What train --report and view show: the history of a run, out of its log.
const stepAxis = () => ({ name: "step", kind: "", whole: true });
function runMarks() {
  const h = data.history, marks = [];
  h.starts.forEach((s, i) => { if (i > 0 || s.step > 0) marks.push({ x: s.step, label: "restart" }); });
  return marks;
}
const numberOf = n => { const [unit, of] = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]].find(([, of]) => n >= of) || ["", 1]; return (show(n / of, 4) + " " + unit).trim(); };
function columnPoints(name) {
  const { steps } = data.history;
  return steps.step.map((step, i) => [step, steps[name][i] === null ? NaN : steps[name][i]]);
}

function runOverview() {
  const h = data.history, s = data.answer, last = name => { const list = h.steps[name].filter(v => v !== null); return list.length ? list[list.length - 1] : NaN; };
  const box = section("overview", "The run", "");
  box.classList.add("full");
  const start = h.starts.length ? h.starts[h.starts.length - 1].start : {};
  const list = [["loss", show(s ? s.final_loss : last("loss"), 5), "of the last step"]];
  if (h.evaluations.length) list.push(["validation loss", show(h.evaluations[h.evaluations.length - 1].validation_loss, 5), "after step " + h.evaluations[h.evaluations.length - 1].step]);
  list.push(["tokens/s", show(s ? s.tokens_per_second : last("tokens_per_second"), 4), s ? "of the median step" : "of the last step"]);
  list.push(["MFU", amount("%", s ? s.mfu : last("mfu"), 3), start.peak_flops ? "of " + show(start.peak_flops / 1e9, 4) + " GFLOP/s" : ""]);
  list.push(["steps", String(h.steps.step[h.steps.step.length - 1]), start.steps ? "of " + start.steps : ""]);
  if (start.params) list.push(["parameters", numberOf(start.params), start.schedule ? `schedule ${start.schedule}, ZeRO ${start.zero}` : ""]);
  if (start.ranks) list.push(["ranks", String(start.ranks), `${count(start.global_batch, "sequence")} of ${count(start.seq_len, "token")} a step`]);
  const restarts = runMarks().length;
  list.push(["restarts", String(restarts), h.taken_back ? count(h.taken_back, "step") + " done again" : ""]);
  list.push(["checkpoints", String(h.checkpoints.length), h.checkpoints.length ? "the last after step " + h.checkpoints[h.checkpoints.length - 1].step : ""]);
  box.append(facts(list));
  if (!s) box.append(el("p", { class: "soft" }, "The log has no summary: the run is not over, or it ended before its last step. Predicted and measured values come with the summary."));
  if (h.steps.each_point > 1) box.append(el("p", { class: "soft" }, `Each point of the drawings is the mean of ${h.steps.each_point} steps.`));
}

function runChart(id, title, about, y, series, extra = {}) {
  const box = section(id, title, about);
  chart(box, { label: title + " by step", x: stepAxis(), y, marks: runMarks(), series, ...extra });
  const named = series.filter(s => s.points.length);
  box.append(lateTable(title, () => {
    const rows = new Map();
    named.forEach((s, i) => s.points.forEach(([x, v]) => { if (!rows.has(x)) rows.set(x, named.map(() => "")); rows.get(x)[i] = Number.isFinite(v) ? show(v, 6) : "not finite"; }));
    return table(title + " by step", ["step", ...named.map(s => s.name || title)], [...rows].sort((a, b) => a[0] - b[0]).map(([x, cells]) => [String(x), ...cells]));
  }));
}
const colourOf = name => () => css(name);

// Predicted beside measured: two bars for each of several amounts.
function twins(box, rows, kind) {
  const most = Math.max(...rows.map(r => Math.max(r[1], r[2])), 1e-300);
  const bars = el("div", { class: "stack", role: "img", "aria-label": "Predicted beside measured; the same as a table below" });
  for (const [name, predicted, measured] of rows)
    bars.append(el("div", { class: "name" }, name), el("div", { class: "plot" }, [["predicted", predicted, "--predicted"], ["measured", measured, "--measured"]].map(([which, v, colour]) =>
      el("div", { style: "position:relative;padding-right:0" }, el("div", { class: "track", style: "height:11px;margin:1px 0" }, el("span", { style: `width:${(100 * v / most).toFixed(2)}%;background:var(${colour})`, title: `${name}, ${which}: ${amount(kind, v)}` })))),
      el("span", { class: "sum" }, amount(kind, measured, 3))));
  box.append(legend([["predicted", "var(--predicted)"], ["measured, with its value", "var(--measured)"]]), bars);
}
function runTwins() {
  const s = data.answer;
  if (!s) return;
  const memory = section("memory-twins", "Memory of rank 0", "Peak of its arena by category.");
  const names = Object.keys(s.memory_bytes.predicted).filter(name => name !== "total" && (s.memory_bytes.predicted[name] > 0 || s.memory_bytes.measured[name] > 0)).concat("total");
  const rows = names.map(name => [name, s.memory_bytes.predicted[name], s.memory_bytes.measured[name]]);
  twins(memory, rows, "B");
  memory.append(asTable("Memory", "Bytes of rank 0", ["category", "predicted", "measured", "difference"], rows.map(([name, p, m]) => [name, String(p), String(m), String(m - p)])));
  const traffic = [];
  for (const [axis, verbs] of Object.entries(s.traffic_bytes.predicted)) {
    const measured = s.traffic_bytes.measured[axis] || {};
    for (const verb of new Set([...Object.keys(verbs), ...Object.keys(measured)])) if (verbs[verb] || measured[verb]) traffic.push([axis + " " + verb.replaceAll("_", " "), verbs[verb] || 0, measured[verb] || 0]);
  }
  if (traffic.length) {
    const box = section("traffic-twins", "What rank 0 sends in a step", "");
    twins(box, traffic, "B");
    box.append(asTable("Traffic", "Bytes that rank 0 sends in a step", ["axis and verb", "predicted", "measured", "difference"], traffic.map(([name, p, m]) => [name, String(p), String(m), String(m - p)])));
  }
  const time = section("time-twins", "Step time", "");
  twins(time, [["step", s.step_seconds.predicted, s.step_seconds.measured]], "s");
  const lines = [["step", amount("s", s.step_seconds.predicted), amount("s", s.step_seconds.measured)], ["pipeline bubble", amount("%", s.bubble_fraction.predicted, 3), amount("%", s.bubble_fraction.measured, 3)]];
  time.append(table("Predicted and measured", ["quantity", "predicted", "measured"], lines));
  if (s.ranks_share_cores) time.append(el("p", { class: "soft" }, "Ranks share cores here, so no transfer is hidden behind other work."));
  if (s.missed_predictions && s.missed_predictions.length)
    time.append(el("p", {}, "Off by more than a tenth:"), el("ul", { class: "events" }, s.missed_predictions.map(text => el("li", {}, text))));
}

// Loads of the experts over the steps, on a scale that reaches as far as they do.
function runExperts() {
  const e = data.history.experts;
  if (!e) return;
  const box = section("experts", "Loads of the experts", "Tokens sent to each expert, relative to an even load: 1 is even.");
  box.classList.add("full");
  const most = Math.max(2, ...e.layers.flatMap(l => l.loads.flat())), canvas = el("canvas", { role: "img", tabindex: 0 }), scale = el("canvas", { "aria-hidden": "true" });
  let now = 0;
  const mix = (a, b, t) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`;
  const rgb = name => css(name).match(/[0-9a-f]{2}/gi).map(x => parseInt(x, 16));
  const colour = (v, even, low, high) => { const t = v > 0 ? Math.log(v) / Math.log(most) : -1; return t >= 0 ? mix(even, high, Math.min(1, t)) : mix(even, low, Math.min(1, -t)); };
  const draw = () => {
    const layer = e.layers[now], n = layer.loads.length, high = Math.max(6, Math.min(18, 420 / n)), left = 74, ratio = devicePixelRatio || 1, axis = 38;
    const even = rgb("--even"), low = rgb("--compute"), top = rgb("--gradients");
    const open = (c, tall) => {
      c.style.height = tall + "px";
      const width = c.clientWidth;
      c.width = Math.round(width * ratio);
      c.height = Math.round(tall * ratio);
      const pen = c.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.font = "12px " + getComputedStyle(document.body).fontFamily;
      pen.textBaseline = "middle";
      return [pen, width];
    };
    const [pen, width] = open(canvas, n * high + axis), columns = e.columns.length, wide = (width - left - 10) / columns;
    layer.loads.forEach((row, r) => row.forEach((v, c) => { pen.fillStyle = colour(v, even, low, top); pen.fillRect(left + c * wide, r * high, wide + 0.4, high - (high > 9 ? 1 : 0)); }));
    pen.fillStyle = css("--soft");
    pen.textAlign = "right";
    const every = Math.ceil(14 / high);
    for (let r = 0; r < n; r += every) pen.fillText("expert " + r, left - 6, r * high + high / 2);
    pen.textAlign = "center";
    const skip = Math.ceil(60 / wide);
    for (let c = 0; c < columns; c += skip) if (left + (c + 0.5) * wide < width - 16) pen.fillText(String(e.columns[c][1]), left + (c + 0.5) * wide, n * high + 12);
    pen.textAlign = "left";
    pen.fillText("step", left, n * high + 29);
    canvas.setAttribute("aria-label", `Layer ${layer.layer}: loads of ${n} experts, at most ${show(Math.max(...layer.loads.flat()), 3)} of an even load`);
    const [key, kw] = open(scale, 34), long = Math.min(360, kw - left - 30);
    for (let i = 0; i < long; ++i) { key.fillStyle = colour(Math.exp((2 * i / long - 1) * Math.log(most)), even, low, top); key.fillRect(left + i, 2, 1.5, 12); }
    key.fillStyle = css("--soft");
    key.textAlign = "center";
    for (const v of [1 / most, 1, most]) key.fillText(v === 1 ? "even" : show(v, 2), left + (Math.log(v) / Math.log(most) + 1) / 2 * long, 24);
    const told = (r, c, x, y) => {
      const title = `expert ${r}, step ${e.columns[c][0]}${e.columns[c][1] > e.columns[c][0] ? " to " + e.columns[c][1] : ""}`;
      showTip(x, y, title, [["load over an even one", show(layer.loads[r][c], 4)], ["dropped in the layer", amount("%", layer.drop_rate[c], 3)]]);
      return `${title}: ${show(layer.loads[r][c], 4)}`;
    };
    canvas.onpointermove = event => {
      const screen = canvas.getBoundingClientRect(), c = Math.floor((event.clientX - screen.left - left) / wide), r = Math.floor((event.clientY - screen.top) / high);
      if (c >= 0 && c < columns && r >= 0 && r < n) told(r, c, event.clientX, event.clientY); else hideTip();
    };
    canvas.onpointerleave = canvas.onblur = hideTip;
    canvas.at = [0, 0];
    canvas.onkeydown = event => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      canvas.at = [Math.max(0, Math.min(n - 1, canvas.at[0] + step[0])), Math.max(0, Math.min(columns - 1, canvas.at[1] + step[1]))];
      const screen = canvas.getBoundingClientRect();
      say(told(canvas.at[0], canvas.at[1], screen.left + left + canvas.at[1] * wide, screen.top + canvas.at[0] * high));
    };
  };
  if (e.layers.length > 1) box.append(el("div", { class: "bar" }, choice("layer", e.layers.map((l, i) => [i, l.layer]), 0, v => { now = +v; draw(); })));
  box.append(canvas, scale, lateTable("Loads", () => table("Largest load of each layer, relative to an even one", ["steps", ...e.layers.map(l => "layer " + l.layer)],
    e.columns.map(([a, b], c) => [a === b ? String(a) : `${a} to ${b}`, ...e.layers.map(l => show(Math.max(...l.loads.map(row => row[c])), 3))]))));
  redraws.push(draw);
}

function runStragglers() {
  const { spreads } = data.history;
  if (!spreads.length) return;
  const box = section("stragglers", "How long each rank works", "Seconds of work in a step, without waiting for others, averaged over the steps of each report.");
  const ranks = spreads[spreads.length - 1].rank_seconds.length, of = s => [...s.rank_seconds].sort((a, b) => a - b);
  const at = s => (s.first_step + s.last_step) / 2;
  chart(box, { label: "Seconds of work by step", x: stepAxis(), y: { name: "work in a step", kind: "s", zero: true }, marks: runMarks(), series: [
    { name: "the slowest rank", colour: colourOf("--gradients"), kind: "line", marked: true, points: spreads.map(s => [at(s), s.rank_seconds[s.slowest_rank], `rank ${s.slowest_rank}`]) },
    { name: "the median rank", colour: colourOf("--compute"), kind: "line", marked: true, points: spreads.map(s => [at(s), of(s)[Math.floor(ranks / 2)]]) }] });
  box.append(lateTable("Work", () => table("Seconds of work in a step by rank", ["steps", "slowest", ...Array.from({ length: ranks }, (_, r) => "rank " + r)],
    spreads.map(s => [`${s.first_step} to ${s.last_step}`, "rank " + s.slowest_rank, ...s.rank_seconds.map(v => amount("s", v, 3))]))));
}

function runEvents() {
  const h = data.history, events = [];
  h.starts.forEach((s, i) => events.push([s.step, i === 0 && s.step === 0 ? "started" : s.start.resumed_from ? "went on from " + s.start.resumed_from : "started again"]));
  h.checkpoints.forEach(c => events.push([c.step, "saved " + c.checkpoint]));
  h.skipped.forEach(s => events.push([s.step, "skipped: " + s.why]));
  h.fingerprints.forEach(f => events.push([f.step, "fingerprint " + f.fingerprint]));
  if (!events.length) return;
  events.sort((a, b) => a[0] - b[0]);
  const box = section("events", "Starts, checkpoints, skipped steps", "");
  const list = el("div", { class: "wide", style: "max-height:340px;overflow-y:auto", role: "region", tabindex: 0, "aria-label": "Events" }, table("By step", ["after step", "what"], events.map(([step, what]) => [String(step), what]), { long: [1] }));
  box.append(list);
}

function startRun() {
  runOverview();
  const h = data.history, line = (name, colour, column) => ({ name, colour: colourOf(colour), kind: "line", points: columnPoints(column) });
  runChart("loss", "Loss", "Mean over the target tokens of the global batch.", { name: "loss, nats a token" }, [line("training", "--measured", "loss"),
    { name: "validation", colour: colourOf("--validation"), kind: "line", marked: true, points: h.evaluations.map(e => [e.step, e.validation_loss]) }]);
  runChart("norm", "Gradient norm", "Before clipping.", { name: "gradient norm", zero: true }, [line("", "--gradients", "grad_norm")]);
  runChart("rate", "Learning rate", "", { name: "learning rate", zero: true }, [line("", "--other", "lr")]);
  runChart("speed", "Tokens per second", "Of all ranks together.", { name: "tokens", kind: "/s", zero: true }, [line("", "--measured", "tokens_per_second")]);
  runChart("mfu", "Model FLOPs utilisation", "FLOPs of the model over the peak of the cores that compute.", { name: "MFU", kind: "%", zero: true }, [line("", "--compute", "mfu")]);
  const predicted = h.starts.filter(s => s.start.predicted_step_seconds), until = h.steps.step[h.steps.step.length - 1];
  runChart("seconds", "Seconds of a step", "", { name: "step", kind: "s", zero: true }, [line("measured", "--measured", "step_seconds"),
    { name: "predicted", dash: true, colour: colourOf("--predicted"), kind: "stairs", points: predicted.flatMap((s, i) => [[s.step + 1, s.start.predicted_step_seconds], [i + 1 < predicted.length ? predicted[i + 1].step : until, s.start.predicted_step_seconds]]) }]);
  runTwins();
  runExperts();
  runStragglers();
  runEvents();
  schedulesSection();
  doneSection();
}
