// Charts: lines, points and stairs over two axes; stacked bars; stacked areas. Each is drawn for the width that it has, so
// texts are never scaled or cut, and each can be walked through by keyboard.

// Round numbers over a range, at most `most` of them.
function ticksOf(low, high, most) {
  const step = roundStep(Math.max((high - low) / Math.max(1, most), 1e-300)), list = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-6; ++k) list.push(k * step);
  return list;
}
// As many as can be: less than half a decade is divided as a plain axis is, more of it by the digits that fit.
function logTicks(low, high, most) {
  if (high < 4 * low) return ticksOf(low, high, most);
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), every = Math.max(1, Math.ceil((last - first) / most));
  let list = [];
  for (const digits of [[1, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1, 3], [1]]) {
    list = [];
    for (let e = first; e <= last; e += digits.length > 1 ? 1 : every)
      for (const d of digits) if (d * 10 ** e >= low * 0.999 && d * 10 ** e <= high * 1.001) list.push(d * 10 ** e);
    if (list.length <= most) break;
  }
  return list;
}

// series: [{name, colour, kind: "line" | "dots" | "stairs", dash, points: [[x, y, title?, entries?]]}]; marks: [{x, label}]: upright lines.
// x, y: {name, kind: unit, zero: the axis begins at 0, log}.
function chart(box, { label, x, y, series, marks = [], limit, high = 260, click, named: isNamed }) {
  const drawn = shape("svg", { class: "chart", height: high, tabindex: 0, role: "img", "aria-label": label + ". Arrow keys go from point to point." });
  const all = series.flatMap(s => s.points.map(p => ({ s, p }))).filter(({ p }) => Number.isFinite(p[0]) && Number.isFinite(p[1]));
  const named = series.filter(s => s.name && s.points.length);
  if (named.length) box.append(legend(named.map(s => [s.name, s.colour(), s.kind === "dots" ? "dot" : s.dash ? "dash" : "line"])));
  if (!all.length) {
    box.append(el("p", { class: "soft" }, "Nothing to draw."));
    return;
  }
  box.append(drawn);
  const draw = () => {
    const width = Math.max(220, drawn.clientWidth || box.clientWidth);
    const range = (axis, i) => {
      const values = all.map(({ p }) => p[i]).filter(v => !axis.log || v > 0);
      if (i === 0) values.push(...marks.map(m => m.x));
      if (i === 0 && limit) values.push(limit.x);
      let low = values.reduce((a, b) => Math.min(a, b), Infinity), top = values.reduce((a, b) => Math.max(a, b), -Infinity);
      if (axis.zero) low = Math.min(0, low);
      if (low === top) { const d = Math.abs(low) * 0.1 || 1; if (axis.log) { low /= 2; top *= 2; } else { low = axis.zero && low === 0 ? 0 : low - d; top += d; } }
      else if (i === 1 && !axis.log) { top += (top - low) * 0.06; if (!axis.zero) low -= (top - low) * 0.06; }
      else if (i === 0 && series.some(s => s.kind === "dots")) { const d = (top - low) * 0.04; low = axis.zero ? low : low - d; top += d; }
      return [low, top];
    };
    const [x0, x1] = range(x, 0), [y0, y1] = range(y, 1);
    const [xu, xo] = unitFor(x.kind || "", Math.max(Math.abs(x0), Math.abs(x1))), [yu, yo] = unitFor(y.kind || "", Math.max(Math.abs(y0), Math.abs(y1)));
    const yt = y.log ? logTicks(y0, y1, 6) : ticksOf(y0 / yo, y1 / yo, 5).map(v => v * yo);
    const left = 14 + 7.2 * Math.max(...yt.map(v => show(v / yo, 6).length)), right = 16, top = 24, bottom = 42;
    const scale = (axis, low, end) => axis.log ? v => (Math.log(v) - Math.log(low)) / (Math.log(end) - Math.log(low)) : v => (v - low) / (end - low);
    const sx = scale(x, x0, x1), sy = scale(y, y0, y1);
    const px = v => left + sx(v) * (width - left - right), py = v => high - bottom - sy(v) * (high - top - bottom);
    drawn.replaceChildren();
    drawn.setAttribute("viewBox", `0 0 ${width} ${high}`);
    const text = (at, up, words, anchor = "middle") => drawn.append(shape("text", { x: at, y: up, "text-anchor": anchor }, words));
    for (const v of yt) {
      drawn.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: py(v), y2: py(v) }));
      text(left - 6, py(v) + 4, show(v / yo, 6), "end");
    }
    const widest = 7.2 * Math.max(show(x1 / xo, 6).length, show(x0 / xo, 6).length) + 14;
    const xt = x.log ? logTicks(x0, x1, 5) : ticksOf(x0 / xo, x1 / xo, (width - left - right) / widest).map(v => v * xo);
    for (const v of xt) {
      if (x.whole && Math.abs(v / xo - Math.round(v / xo)) > 1e-6) continue;
      drawn.append(shape("line", { class: "frame", x1: px(v), x2: px(v), y1: high - bottom, y2: high - bottom + 5 }));
      text(Math.min(px(v), width - 3.6 * show(v / xo, 6).length), high - bottom + 18, show(v / xo, 6));
    }
    drawn.append(shape("line", { class: "frame", x1: left, x2: width - right, y1: high - bottom, y2: high - bottom }));
    text(left, 13, y.name + (yu ? ", " + yu : "") + (y.log ? ", logarithmic" : ""), "start");
    text(width - right, high - 6, x.name + (xu ? ", " + xu : ""), "end");
    let labelled = -Infinity;
    for (const mark of marks) {
      drawn.append(shape("line", { x1: px(mark.x), x2: px(mark.x), y1: top, y2: high - bottom, stroke: css("--soft"), "stroke-dasharray": "2 3" }));
      const words = 6.6 * mark.label.length, at = Math.min(px(mark.x) + 3, width - right - words);
      if (at < labelled + 8 || at < left) continue;
      labelled = at + words;
      text(at, top + 10, mark.label, "start");
    }
    if (limit) {
      drawn.append(shape("line", { x1: px(limit.x), x2: px(limit.x), y1: top, y2: high - bottom, stroke: css("--limit"), "stroke-width": 2, "stroke-dasharray": "5 3" }));
      text(px(limit.x) - 4, top + 10, limit.label, "end");
    }
    for (const s of series) {
      const points = s.points.filter(p => Number.isFinite(p[0]) && Number.isFinite(p[1]) && (!y.log || p[1] > 0));
      const colour = s.colour();
      if (s.kind === "dots" || points.length === 1 || s.marked)
        for (const p of points) drawn.append(shape("circle", { cx: px(p[0]), cy: py(p[1]), r: p[4] ? 7 : s.kind === "dots" ? 4.5 : 3, fill: colour, stroke: p[4] ? css("--chosen-line") : css("--card"), "stroke-width": p[4] ? 3 : 1 }));
      if (s.kind !== "dots" && points.length > 1) {
        let path = "";
        points.forEach((p, k) => { path += (k === 0 ? "M" : s.kind === "stairs" ? "H" + px(p[0]).toFixed(1) + "V" : "L") + (k > 0 && s.kind === "stairs" ? "" : px(p[0]).toFixed(1) + " ") + py(p[1]).toFixed(1); });
        drawn.append(shape("path", { d: path, fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": s.dash ? "6 4" : undefined, "stroke-linejoin": "round" }));
      }
    }
    const placed = [];  // names of points, each above those that it would lie on
    for (const { p } of isNamed ? all : []) {
      const words = 6.8 * p[2].length, at = px(p[0]) + 9 + words > width ? px(p[0]) - 9 - words : px(p[0]) + 9;
      let up = py(p[1]) + 4;
      while (placed.some(o => Math.abs(o.up - up) < 13 && o.at < at + words && at < o.at + o.words)) up -= 13;
      placed.push({ at, up, words });
      text(at, up, p[2], "start");
    }
    const cursor = shape("circle", { r: 6, fill: "none", stroke: css("--text"), "stroke-width": 2, visibility: "hidden" });
    drawn.append(cursor);
    const at = found => {
      cursor.setAttribute("cx", px(found.p[0]));
      cursor.setAttribute("cy", py(found.p[1]));
      cursor.setAttribute("visibility", "visible");
      const screen = drawn.getBoundingClientRect();
      const entries = found.p[3] || [[x.name, amount(x.kind || "", found.p[0], 6)], [y.name, amount(y.kind || "", found.p[1], 6)]];
      showTip(screen.left + px(found.p[0]), screen.top + py(found.p[1]), found.p[2] || found.s.name || y.name, entries);
      return (found.p[2] || found.s.name || y.name) + ", " + entries.map(e => e.join(" ")).join(", ");
    };
    const hide = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
    const both = series.some(s => s.kind === "dots"), visible = all.filter(({ p }) => !y.log || p[1] > 0);
    drawn.onpointermove = event => {
      const screen = drawn.getBoundingClientRect(), mx = event.clientX - screen.left, my = event.clientY - screen.top;
      let best = null, least = Infinity;
      for (const one of visible) {
        const far = (px(one.p[0]) - mx) ** 2 + (both ? 1 : 0.01) * (py(one.p[1]) - my) ** 2;
        if (far < least) [best, least] = [one, far];
      }
      if (best && least < 3600) at(best); else hide();
      drawn.near = best;
    };
    drawn.onpointerleave = hide;
    drawn.onblur = hide;
    drawn.onclick = () => { if (click && drawn.near) click(drawn.near.p); };
    const order = [...visible].sort((a, b) => a.p[0] - b.p[0]);
    drawn.onkeydown = event => {
      if (event.key === "Enter" && click && drawn.near) return click(drawn.near.p);
      if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) || !order.length) return;
      event.preventDefault();
      const now = drawn.near ? order.indexOf(drawn.near) : -1;
      const next = event.key === "Home" ? 0 : event.key === "End" ? order.length - 1 : Math.max(0, Math.min(order.length - 1, now + (event.key === "ArrowRight" ? 1 : -1)));
      drawn.near = order[next];
      say(at(order[next]));
    };
  };
  redraws.push(draw);
}

// Stacked bars that lie. parts: [{name, colour}]; rows: [{name, plan: the name is a plan's, parts: [number], chosen}]; limit: {value, name}.
function stacks(parts, rows, kind, limit) {
  const sums = rows.map(row => row.parts.reduce((a, b) => a + b, 0));
  const most = Math.max(...sums, limit ? limit.value : 0, 1e-300) * 1.02, [unit, of] = unitFor(kind, most);
  const box = el("div", { class: "stack", role: "img", "aria-label": "Stacked bars; the same as a table below" });
  rows.forEach((row, r) => {
    const track = el("div", { class: "track" }, row.parts.map((part, i) => {
      const piece = el("span", { style: `width:${(100 * part / most).toFixed(3)}%;background:${parts[i].colour}` });
      piece.addEventListener("pointermove", event => showTip(event.clientX, event.clientY, row.name,
        [[parts[i].name, amount(kind, part)], ["of it all", amount("%", sums[r] > 0 ? part / sums[r] : 0, 3)], ["together", amount(kind, sums[r])]]));
      piece.addEventListener("pointerleave", hideTip);
      return piece;
    }), limit ? el("span", { class: "limit", style: `left:${(100 * limit.value / most).toFixed(3)}%` }) : null);
    box.append(el("div", { class: "name" }, row.chosen ? el("span", { class: "badge" }, "chosen") : null, row.chosen ? " " : "", row.plan ? planWords(row.name) : row.name),
      el("div", { class: "plot" }, track, el("span", { class: "sum" }, show(sums[r] / of, 4) + " " + unit)));
  });
  const ticks = ticksOf(0, most / of, 4).filter(t => t * of <= most * 0.97);
  box.append(el("div", { class: "name" }), el("div", { class: "scale" }, ticks.map((t, k) =>
    el("span", { class: k === 0 ? "first" : null, style: `left:${(100 * t * of / most).toFixed(2)}%` }, show(t, 5))), el("span", { class: "unit first" }, "in " + unit)));
  return el("div", {}, legend([...parts.map(part => [part.name, part.colour]), ...(limit ? [[`${limit.name}: ${amount(kind, limit.value)}`, "var(--limit)", "dash"]] : [])]), box);
}

// What ranks hold over the step: what is kept throughout, and above it what the passes keep.
const memoryColours = ["--parameters", "--gradients", "--optimizer", "--activations", "--communication", "--other"];
function memoryPanels(box, track, limit) {
  const bytes = data.memory_unit === "B", most = Math.max(limit || 0, ...track.memory.map(peakOf)), panels = el("div", { class: "panels" });
  const first = track.firstRank || 0, shown = track.memory.slice(first, first + 8);
  box.replaceChildren(panels);
  return shown.map((rank, i) => {
    const panel = el("div", {}, el("h3", {}, "rank " + (first + i))), high = 150;
    const drawn = shape("svg", { class: "chart", height: high, role: "img", "aria-label": `rank ${first + i}: at most ${amount(data.memory_unit, peakOf(rank))}` });
    panel.append(drawn);
    panels.append(panel);
    return () => drawPanel(drawn, rank, track, most, bytes ? limit : 0, high, first + i);
  });
}
const keptOf = rank => rank.kept.reduce((a, b) => a + b, 0);
function peakOf(rank) {
  let most = 0;
  for (let k = 1; k < rank.held.length; k += 2) most = Math.max(most, rank.held[k]);
  return keptOf(rank) + most;
}
function drawPanel(drawn, rank, track, most, limit, high, number) {
  const width = Math.max(200, drawn.clientWidth), top = 18, bottom = 36, right = 10, [unit, of] = unitFor(data.memory_unit, most);
  const ticks = ticksOf(0, most / of, 3), left = 12 + 7.2 * Math.max(...ticks.map(t => show(t, 5).length));
  const [tu, to] = unitFor(timeUnit(), track.makespan), x = t => left + t / track.makespan * (width - left - right), y = v => high - bottom - v / most * (high - top - bottom) * 0.97;
  drawn.replaceChildren();
  drawn.setAttribute("viewBox", `0 0 ${width} ${high}`);
  let below = 0;
  // From the longest lived up; activations last, as they alone move.
  const order = [0, 1, 2, 4, 5, 3];
  for (const c of order) {
    if (c !== 3 && rank.kept[c] > 0)
      drawn.append(shape("rect", { x: left, width: width - left - right, y: y(below + rank.kept[c]), height: Math.max(0, y(below) - y(below + rank.kept[c])), fill: css(memoryColours[c]) }));
    if (c !== 3) below += rank.kept[c];
  }
  const rest = rank.kept[3];
  let path = `M${left} ${y(below)}V${y(below + rest)}`;
  for (let k = 0; k < rank.held.length; k += 2) path += `H${x(rank.held[k]).toFixed(1)}V${y(below + rest + rank.held[k + 1]).toFixed(1)}`;
  path += `H${x(track.makespan).toFixed(1)}V${y(below)}Z`;
  drawn.append(shape("path", { d: path, fill: css("--activations") }));
  if (limit) drawn.append(shape("line", { x1: left, x2: width - right, y1: y(limit), y2: y(limit), stroke: css("--limit"), "stroke-width": 2, "stroke-dasharray": "5 3" }));
  for (const t of ticks) {
    drawn.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(t * of), y2: y(t * of), "stroke-opacity": 0.6 }));
    drawn.append(shape("text", { x: left - 5, y: y(t * of) + 4, "text-anchor": "end" }, show(t, 5)));
  }
  const across = ticksOf(0, track.makespan / to, (width - left) / 70);
  for (const t of across) drawn.append(shape("text", { x: Math.min(x(t * to), width - 3.6 * show(t, 5).length), y: high - bottom + 15, "text-anchor": "middle" }, show(t, 5)));
  drawn.append(shape("text", { x: left, y: 11, "text-anchor": "start" }, unit || memoryName()),
    shape("text", { x: width - right, y: high - 6, "text-anchor": "end" }, tu ? "time in " + tu : timeName()));
  drawn.onpointermove = event => {
    const time = Math.max(0, Math.min(track.makespan, (event.clientX - drawn.getBoundingClientRect().left - left) / (width - left - right) * track.makespan));
    let held = 0;
    for (let k = 0; k < rank.held.length && rank.held[k] <= time; k += 2) held = rank.held[k + 1];
    const entries = rank.kept.map((v, c) => [data.categories[c], v + (c === 3 ? held : 0)]).filter(([, v]) => v > 0).map(([name, v]) => [name, amount(data.memory_unit, v)]);
    showTip(event.clientX, event.clientY, `rank ${number} at ${amount(timeUnit(), time)}`, [...entries, ["together", amount(data.memory_unit, keptOf(rank) + held)]]);
  };
  drawn.onpointerleave = hideTip;
}
function memorySection() {
  const tracks = data.tracks.filter(t => t.memory);
  if (!tracks.length) return;
  const bytes = data.memory_unit === "B", limit = data.machine ? data.machine.usable_bytes : 0;
  const box = section("memory", "Memory of each rank over the step", bytes
    ? "The lower bands are there throughout the step. Above them is what the microbatches in flight keep, each from the start of its forward pass to the end of its backward pass."
    : "In activations of a full stage. A microbatch counts from the start of its forward pass to the end of its backward pass.");
  box.classList.add("full");
  const inside = el("div"), bar = el("div", { class: "bar" });
  let now = 0, draws = [];
  const draw = () => draws.forEach(one => one());
  const reset = () => { draws = memoryPanels(inside, tracks[now], limit); draw(); };
  const ranksChoice = () => {
    const old = bar.querySelector(".ranks");
    if (old) old.remove();
    const n = tracks[now].memory.length;
    if (n <= 8) return;
    const starts = Array.from({ length: Math.ceil(n / 8) }, (_, k) => 8 * k);
    const one = choice("ranks", starts.map(s => [s, `${s} to ${Math.min(n, s + 8) - 1}`]), tracks[now].firstRank || 0, v => { tracks[now].firstRank = +v; reset(); });
    one.classList.add("ranks");
    bar.append(one);
  };
  if (tracks.length > 1) bar.append(choice("schedule", tracks.map((t, k) => [k, t.title]), 0, v => { now = +v; ranksChoice(); reset(); }));
  ranksChoice();
  const used = data.categories.map((name, c) => [name, c]).filter(([, c]) => c === 3 || tracks.some(t => t.memory.some(r => r.kept[c] > 0)));
  box.append(bar, legend([...used.map(([name, c]) => [name, `var(${memoryColours[c]})`]), ...(limit ? [["usable: " + amount("B", limit), "var(--limit)", "dash"]] : [])]), inside);
  draws = memoryPanels(inside, tracks[0], limit);
  redraws.push(draw);
  box.append(lateTable("Peaks", () => table("Peak of each rank", ["schedule", "rank", "peak"],
    tracks.flatMap(t => t.memory.map((rank, r) => [t.title, r, amount(data.memory_unit, peakOf(rank))])))));
}
