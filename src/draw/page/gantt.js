// Timelines: a row for each rank. All tracks are on one scale of time, and so is what every rank did, whose clock is another;
// both zoom.
// Of each bar: operation, chunk, stage, microbatch, part of a pair (0 whole, 1 first, 2 second), begin, end.
const BAR = { WIDTH: 7, OP: 0, CHUNK: 1, STAGE: 2, MICROBATCH: 3, PART: 4, BEGIN: 5, END: 6 };
// The same of what each rank did: kind, text, microbatch or -1, begin, end. These do not overlap.
const SEEN = { WIDTH: 5, KIND: 0, TEXT: 1, LABEL: 2, BEGIN: 3, END: 4 };
const gantt = { canvases: [], times: [], left: 60, right: 14, axis: 40, hover: null, traced: null, steps: "1", waits: false };

// The bars of a track over as many steps as are shown, and where they end.
function shownBars(track) {
  if (gantt.steps === "2" && track.two) return [track.two, track.two_makespan];
  if (gantt.steps === "1" || !track.two) return [track.ranks, track.makespan];
  const again = track.ranks.map(bars => bars.map((x, k) =>
    k % BAR.WIDTH === BAR.MICROBATCH ? x + track.microbatches : k % BAR.WIDTH >= BAR.BEGIN ? x + track.makespan : x));
  return [track.ranks.map((bars, r) => bars.concat(again[r])), 2 * track.makespan];
}
const inStep = (track, microbatch) => track.microbatches > 0 ? microbatch % track.microbatches : microbatch;
const stepOf = (track, microbatch) => track.microbatches > 0 ? Math.floor(microbatch / track.microbatches) : 0;

function rowHeight(ranks, hasPairs) { return ranks <= 16 ? (hasPairs ? 36 : 28) : ranks <= 32 ? 20 : 14; }

function layTrack(one) {
  const [ranks, makespan] = shownBars(one.track), high = one.high;
  one.makespan = makespan;
  one.rows = ranks.map((bars, r) => ({ name: "rank " + r, top: r * high, high, bars, width: BAR.WIDTH, begin: BAR.BEGIN, end: BAR.END, isPass: true }));
  one.bottom = ranks.length * high;
  one.canvas.style.height = one.bottom + gantt.axis + "px";
}
function layAll() {
  for (const one of gantt.canvases) if (one.track) layTrack(one);
  for (const time of gantt.times) {
    time.span = Math.max(...gantt.canvases.filter(one => one.time === time).map(one => one.makespan), 1e-12);
    showAll(time);
  }
}
// A scale of time, and what is seen of it; and the buttons that change that.
function addTime() {
  const time = { span: 1, begin: 0, end: 1 };
  gantt.times.push(time);
  return time;
}
const showAll = time => place(time, 0, time.span * 1.01);
function zoomButtons(time) {
  const button = (text, name, act) => el("button", { type: "button", "aria-label": name, title: name, onclick: act }, text);
  return el("span", { class: "buttons" }, button("+", "Zoom in (+)", () => zoom(time, 0.5, middle(time))), button("−", "Zoom out (-)", () => zoom(time, 2, middle(time))),
    button("all", "Show everything (0)", () => showAll(time)));
}

function addCanvas(box, one, label) {
  one.canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-label": label });
  one.pen = one.canvas.getContext("2d");
  gantt.canvases.push(one);
  box.append(one.canvas);
  listen(one);
}

function schedulesSection() {
  if (!data.tracks.length) return;
  const several = data.tracks.length > 1;
  const box = section("schedules", several && (data.kind === "timeline" || data.kind === "run") ? "The pipeline, simulated and measured" : several ? "Schedules side by side" : "The schedule",
    several ? "All on one scale of time." : "");
  box.classList.add("full");
  const canStep = data.tracks.some(t => t.two);
  gantt.steps = canStep && ["2", "barrier"].includes(state.steps) ? state.steps : "1";
  const most = Math.max(0, ...data.tracks.map(t => t.microbatches || 1 + Math.max(-1, ...t.ranks.map(bars => bars.reduce((m, x, k) => k % BAR.WIDTH === BAR.MICROBATCH ? Math.max(m, x) : m, -1)))));
  const traced = el("input", { type: "number", min: 0, max: most - 1, placeholder: "none", style: "width:6.5em", value: state.microbatch,
                               "aria-label": "Microbatch to trace over the ranks, from 0 to " + (most - 1) });
  traced.addEventListener("input", () => trace(traced.value === "" ? null : +traced.value));
  gantt.tracedInput = traced;
  if (state.microbatch !== undefined && +state.microbatch < most) gantt.traced = +state.microbatch;
  const time = addTime();
  box.append(el("div", { class: "bar" }, zoomButtons(time), el("label", {}, "trace microbatch", traced),
    canStep ? choice("show", [["1", "one step"], ["barrier", "two steps, the second after the optimizer's barrier"], ["2", "two steps, no rank waiting for the barrier"]], gantt.steps,
      value => { gantt.steps = value; keepState("steps", value === "1" ? "" : value); layAll(); }) : null));
  const items = data.ops.map(op => [op.name, op.colours.map(c => c[0])]);
  items.push(["idle", css("--idle")]);
  if (data.shades) items.push([data.shades, []]);
  if (canStep) items.push(["underlined: of the second step", []]);
  box.append(legend(items), el("p", { class: "soft" },
    "Scroll to zoom, drag to move, click a pass to trace its microbatch. With the keyboard: arrows move between passes, Enter traces, + - 0 zoom, Escape ends."));
  const ranks = Math.max(...data.tracks.map(t => t.ranks.length));
  const pairs = data.tracks.some(t => t.ranks.some(bars => bars.some((x, k) => k % BAR.WIDTH === BAR.PART && x)));
  data.tracks.forEach(track => {
    box.append(el("h3", {}, planWords(track.title)), el("p", { class: "soft" }, track.note || `${amount(timeUnit(), track.makespan)} from the first pass to the last`));
    addCanvas(box, { track, time, high: rowHeight(ranks, pairs), hasAxis: true }, `${track.title}: ${count(track.ranks.length, "rank")}, ends at ${amount(timeUnit(), track.makespan)}`);
  });
  if (several || data.kind !== "plan")
    box.append(asTable("The schedules", "Schedules", ["schedule", "ranks", "makespan", "bubble"],
      data.tracks.map(t => [t.title, t.ranks.length, amount(timeUnit(), t.makespan), amount("%", t.bubble)])));
}

// Each rank has a canvas of its own: its thread's row is high, those below it low.
function doneSection() {
  const done = data.done;
  if (!done) return;
  const box = section("ranks", "What every rank did",
    "What the thread did, and below it what was under way: dark while the thread was in the call, light while it was hidden behind other work.");
  box.classList.add("full");
  const time = addTime();
  box.append(el("div", { class: "bar" }, zoomButtons(time)), legend(byColour(done.kinds.map((kind, k) => [kind.name, k])).map(group => [group.name, group.colour])));
  done.ranks.forEach((rank, r) => {
    const hasAxis = r % 4 === 3 || r + 1 === done.ranks.length;
    let bottom = 0;
    const rows = rank.rows.map((w, k) => {
      const high = k ? 13 : 26, top = bottom;
      bottom += high;
      return { name: k ? w.name : rank.name, top, high, bars: w.bars, width: SEEN.WIDTH, begin: SEEN.BEGIN, end: SEEN.END, isPass: false };
    });
    bottom += 6;
    const one = { makespan: done.makespan, time, rows, bottom, hasAxis };
    addCanvas(box, one, `${rank.name} ${rank.place}`);
    one.canvas.style.height = bottom + (hasAxis ? gantt.axis : 0) + "px";
  });
  spentSection();
}

// Kinds that have a colour in common are one thing to the eye, and have one name: [name, kind] to groups of them.
function byColour(named) {
  const groups = new Map();
  for (const [name, k] of named) {
    const { colour } = data.done.kinds[k];
    if (!groups.has(colour)) groups.set(colour, { colour, names: [], kinds: [] });
    groups.get(colour).names.push(name);
    groups.get(colour).kinds.push(k);
  }
  return [...groups.values()].map(group => ({ ...group, name: group.names.join(", ") }));
}

// Seconds of each rank's thread by kind.
function spentSection() {
  const done = data.done;
  const sums = done.ranks.map(rank => {
    const sum = done.kinds.map(() => 0), bars = rank.rows[0].bars;
    for (let b = 0; b < bars.length; b += SEEN.WIDTH) sum[bars[b + SEEN.KIND]] += bars[b + SEEN.END] - bars[b + SEEN.BEGIN];
    return sum;
  });
  const used = done.kinds.map((_, k) => k).filter(k => sums.some(sum => sum[k] > 0));
  const name = k => done.kinds[k].name === "step" ? "else in the step" : done.kinds[k].name;
  const box = section("spent", "Where the time of each rank went", "Each moment of its thread counts once.");
  box.classList.add("full");
  const groups = byColour(used.map(k => [name(k), k]));
  box.append(stacks(groups,
    done.ranks.map((rank, r) => ({ name: rank.name + (rank.place ? ": " + rank.place : ""), parts: groups.map(group => group.kinds.reduce((sum, k) => sum + sums[r][k], 0)) })), "s"),
    asTable("The seconds", "Milliseconds of each rank's thread", ["rank", ...used.map(name)],
      done.ranks.map((rank, r) => [rank.name + (rank.place ? ": " + rank.place : ""), ...used.map(k => (1000 * sums[r][k]).toFixed(2))])));
}

// ---- scales of time
const scaleOf = one => Math.max(1e-300, (one.canvas.clientWidth - gantt.left - gantt.right) / (one.time.end - one.time.begin));
const middle = time => (time.begin + time.end) / 2;
function place(time, begin, length) {
  time.begin = Math.max(0, Math.min(begin, time.span * 1.01 - length));
  time.end = time.begin + length;
  drawGantt();
}
function zoom(time, factor, at) {
  const length = Math.min(Math.max((time.end - time.begin) * factor, time.span * 1e-6), time.span * 1.01);
  place(time, at - (at - time.begin) / (time.end - time.begin) * length, length);
}
function trace(microbatch) {
  gantt.traced = microbatch;
  gantt.tracedInput.value = microbatch === null ? "" : microbatch;
  keepState("microbatch", microbatch);
  drawGantt();
}
function drawGantt() {
  if (gantt.waits) return;
  gantt.waits = true;
  requestAnimationFrame(() => { gantt.waits = false; if (gantt.canvases.length) drawCanvases(); });
}
function startGantt() {
  if (!gantt.canvases.length) return;
  const names = gantt.canvases.flatMap(one => (one.rows || []).map(row => row.name)).concat(data.tracks.map(t => "rank " + (t.ranks.length - 1)));
  gantt.left = Math.min(20 + 7.2 * Math.max(...names.map(name => name.length)), Math.max(70, innerWidth * 0.3));
  layAll();
  redraws.push(drawGantt);
}

// ---- drawing
// The first bar of a row that ends after the time.
function firstAfter({ bars, width, end }, time) {
  let low = 0, high = bars.length / width;
  while (low < high) {
    const half = (low + high) >> 1;
    if (bars[half * width + end] > time) high = half; else low = half + 1;
  }
  return low * width;
}
function drawLabel(pen, label, from, to, y, high, colour, end) {
  const points = Math.min(12, high - 2, (to - from - 3) / (0.62 * label.length));
  if (points < 6.5) return;
  pen.fillStyle = colour;
  pen.font = points.toFixed(1) + "px " + gantt.font;
  pen.fillText(label, (Math.max(from, gantt.left) + Math.min(to, end)) / 2, y + high / 2 + 0.5);  // of what is to be seen of it
}
// Passes thinner than a pixel, as the mean of what lies in it: those that are drawn one by one would hide the shorter ones, which
// are always the same. Of each half of a row (BAR.PART) and of the whole one.
const channels = new Map();
function channelsOf(colour) {
  if (!channels.has(colour)) channels.set(colour, colour.match(/[0-9a-f]{2}/gi).map(x => parseInt(x, 16)));
  return channels.get(colour);
}
function thinPasses(pen, alpha) {
  const columns = [0, 1, 2].map(() => ({ at: 0, covered: 0, sum: [0, 0, 0] }));
  const flush = (column, wide) => {
    if (column.covered > 0) {
      pen.globalAlpha = alpha * Math.min(1, Math.max(0.5, column.covered));  // one alone is still seen
      pen.fillStyle = `rgb(${column.sum.map(v => Math.round(v / column.covered)).join(",")})`;
      pen.fillRect(column.at, column.y, 1, column.high);
    }
    Object.assign(column, { at: wide, covered: 0, sum: [0, 0, 0] });
  };
  return {
    add(part, from, to, y, high, colour) {
      const column = columns[part], of = channelsOf(colour);
      for (let at = Math.floor(from); at < to; ++at) {
        if (at !== column.at) flush(column, at);
        const share = Math.min(to, at + 1) - Math.max(from, at);
        column.covered += share;
        column.sum.forEach((v, i) => { column.sum[i] = v + share * of[i]; });
        Object.assign(column, { y, high });
      }
    },
    flush() { columns.forEach(column => flush(column, 0)); },
  };
}
function drawRow(one, row, x, end) {
  const { pen } = one, { bars, width } = row, full = row.high - 2, track = one.track;
  const mark = gantt.traced !== null ? gantt.traced : gantt.hover && gantt.hover.microbatch >= 0 ? gantt.hover.microbatch : null;
  const thin = thinPasses(pen, mark === null ? 1 : 0.3), marked = [];
  for (let b = firstAfter(row, one.time.begin); b < bars.length && bars[b + row.begin] < one.time.end; b += width) {
    const from = x(bars[b + row.begin]), to = x(bars[b + row.end]), part = row.isPass ? bars[b + BAR.PART] : 0;
    const high = part ? full / 2 : full, y = row.top + 1 + (part === 2 ? high : 0);
    const colour = row.isPass ? data.ops[bars[b + BAR.OP]].colours[bars[b + BAR.CHUNK]] : [data.done.kinds[bars[b + SEEN.KIND]].colour, data.done.kinds[bars[b + SEEN.KIND]].onIt];
    const number = row.isPass ? bars[b + BAR.MICROBATCH] : bars[b + SEEN.LABEL], shown = row.isPass ? inStep(track, number) : number;
    if (to - from < 1) {
      if (shown === mark) marked.push([from, y, high, colour[0]]);
      else thin.add(part, from, to, y, high, colour[0]);
      continue;
    }
    pen.globalAlpha = mark === null || shown === mark ? 1 : 0.3;
    pen.fillStyle = colour[0];
    pen.fillRect(from, y, to - from - (to - from > 4 ? 1 : (to - from) * 0.12), high - (part === 1 ? 0.5 : 0));
    if (row.isPass && stepOf(track, number) > 0) {
      pen.fillStyle = colour[1];
      pen.fillRect(from + 1, y + high - 3, Math.max(to - from - 3, 0.5), 1.5);
    }
    if (shown >= 0) drawLabel(pen, String(shown), from, to, y, high, colour[1], end);
  }
  thin.flush();
  pen.globalAlpha = 1;
  for (const [from, y, high, colour] of marked) {
    pen.fillStyle = colour;
    pen.fillRect(from, y, 1, high);
  }
}
// The traced microbatch's way: from the end of each pass to the beginning of the next one.
function drawTrace(one, x) {
  const { pen, track } = one;
  const stops = [];
  one.rows.forEach(row => {
    for (let b = 0; b < row.bars.length; b += BAR.WIDTH) {
      const number = row.bars[b + BAR.MICROBATCH], op = data.ops[row.bars[b + BAR.OP]];
      if (inStep(track, number) !== gantt.traced || !["F", "B", "BW"].includes(op.letter)) continue;
      stops.push({ step: stepOf(track, number), forward: op.forward, stage: row.bars[b + BAR.STAGE], y: row.top + row.high / 2, begin: row.bars[b + BAR.BEGIN], end: row.bars[b + BAR.END] });
    }
  });
  stops.sort((a, b) => a.step - b.step || b.forward - a.forward || (a.forward ? a.stage - b.stage : b.stage - a.stage));
  pen.strokeStyle = css("--text");
  pen.lineWidth = 1.5;
  for (let k = 0; k + 1 < stops.length; ++k) {
    const a = stops[k], b = stops[k + 1];
    if (a.step !== b.step) continue;
    const x1 = x(a.end), x2 = x(b.begin);
    pen.beginPath();
    pen.moveTo(x1, a.y);
    pen.lineTo(x2, b.y);
    pen.stroke();
    pen.fillStyle = css("--text");
    pen.beginPath();
    pen.arc(x2, b.y, 2.5, 0, 7);
    pen.fill();
  }
}
function drawCanvases() {
  gantt.font = getComputedStyle(document.body).fontFamily;
  const colours = { text: css("--text"), soft: css("--soft"), idle: css("--idle"), accent: css("--accent") };
  for (const one of gantt.canvases) drawOne(one, colours);
}
function drawOne(one, colours) {
  const { canvas, pen, bottom } = one, ratio = window.devicePixelRatio || 1, view = one.time;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const scale = scaleOf(one), x = time => gantt.left + (time - view.begin) * scale, right = width - gantt.right;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  pen.save();
  pen.beginPath();
  pen.rect(gantt.left, 0, right - gantt.left, bottom + 7);
  pen.clip();
  for (const row of one.rows) {
    pen.fillStyle = colours.idle;
    pen.fillRect(x(0), row.top + 1, one.makespan * scale, row.high - 2);
    drawRow(one, row, x, right);
  }
  if (one.track && gantt.traced !== null) drawTrace(one, x);
  if (one.picked) {
    const row = one.rows[one.picked.row], bar = one.picked.bar;
    pen.strokeStyle = colours.text;
    pen.lineWidth = 2.5;
    pen.strokeRect(x(row.bars[bar + row.begin]), row.top + 1, Math.max(3, (row.bars[bar + row.end] - row.bars[bar + row.begin]) * scale), row.high - 2);
  }
  pen.fillStyle = colours.text;
  pen.fillRect(x(one.makespan) - 1, 0, 1.5, bottom + 7);
  if (gantt.hover && gantt.hover.on === one.time) {
    pen.globalAlpha = 0.5;
    pen.fillRect(x(gantt.hover.time), 0, 1, bottom + 7);
    pen.globalAlpha = 1;
  }
  pen.restore();
  if (one.hasAxis) drawAxis(one, x, scale, right, colours);
  pen.textAlign = "right";
  pen.fillStyle = colours.text;
  for (const row of one.rows) {
    pen.font = Math.min(12, row.high - 2) + "px " + gantt.font;
    pen.fillText(row.name, gantt.left - 8, row.top + row.high / 2 + 0.5, gantt.left - 12);
  }
}
// Marks at round times, without those that the end's own would lie on.
function drawAxis(one, x, scale, right, colours) {
  const { pen, bottom } = one, view = one.time, [unit, of] = unitFor(timeUnit() === "s" || !one.track ? "s" : "", view.end - view.begin);
  const step = roundStep(78 / scale / of) * of, end = x(one.makespan), shownEnd = end >= gantt.left - 0.5 && end <= right + 0.5;
  pen.font = "600 11px " + gantt.font;
  const endText = show(one.makespan / of, 5), half = pen.measureText(endText).width / 2;
  const endAt = Math.min(Math.max(end, gantt.left + half), right - half + 12);
  pen.font = "11px " + gantt.font;
  pen.textAlign = "center";
  for (let k = Math.ceil(view.begin / step - 1e-9); k * step <= view.end; ++k) {
    const at = x(k * step), text = show(k * step / of, 7), wide = pen.measureText(text).width / 2;
    if (at > right + 0.5) break;
    pen.fillStyle = colours.soft;
    pen.fillRect(at, bottom + 2, 1, 5);
    if (at + wide > right + gantt.right || (shownEnd && Math.abs(at - endAt) < wide + half + 8)) continue;
    pen.fillText(text, at, bottom + 15);
  }
  if (shownEnd) {
    pen.fillStyle = colours.text;
    pen.font = "600 11px " + gantt.font;
    pen.fillText(endText, endAt, bottom + 15);
  }
  pen.fillStyle = colours.soft;
  pen.font = "11px " + gantt.font;
  pen.textAlign = "left";
  pen.fillText(unit ? "time in " + unit : timeName(), gantt.left, bottom + 31);
}

// ---- what the pointer and the keyboard do
function barAt(one, px, py) {
  const at = one.rows.findIndex(r => py >= r.top && py < r.top + r.high), row = one.rows[at], time = one.time.begin + (px - gantt.left) / scaleOf(one);
  if (px < gantt.left || !row) return null;
  const low = py - row.top > row.high / 2;
  let found = null;
  for (let b = firstAfter(row, time); b < row.bars.length && row.bars[b + row.begin] <= time; b += row.width)
    if (!found || (row.isPass && row.bars[b + BAR.PART] === 2 && low)) found = { row: at, bar: b, time };
  return found;
}
function tell(one, { row: r, bar: b }) {
  const row = one.rows[r], bars = row.bars, unit = row.isPass ? timeUnit() : "s";
  const times = [["start", amount(unit, bars[b + row.begin], 6)], ["end", amount(unit, bars[b + row.end], 6)],
                 ["duration", amount(unit, bars[b + row.end] - bars[b + row.begin], 6)]];
  if (!row.isPass) {
    const [name, ...notes] = data.done.texts[bars[b + SEEN.TEXT]], list = [["row", row.name]];
    for (let k = 0; k < notes.length; k += 2) list.push([notes[k], notes[k + 1]]);
    return { title: name, entries: list.concat(times), microbatch: -1 };
  }
  const op = data.ops[bars[b + BAR.OP]], number = bars[b + BAR.MICROBATCH], shown = inStep(one.track, number);
  const entries = [["rank", row.name.slice(5)], ["stage", bars[b + BAR.STAGE]], ["microbatch", shown]];
  if (stepOf(one.track, number) > 0) entries.push(["step", "the second"]);
  if (bars[b + BAR.PART]) entries.push(["", "runs together with another pass"]);
  return { title: `${bars[b + BAR.STAGE]}${op.letter}${shown}: ${op.name}`, entries: entries.concat(times), microbatch: shown };
}
function pick(one, row, bar) {
  one.picked = { row, bar };
  const list = one.rows[row], length = one.time.end - one.time.begin, begin = list.bars[bar + list.begin], end = list.bars[bar + list.end];
  if (begin < one.time.begin || end > one.time.end) place(one.time, (begin + end) / 2 - length / 2, length);
  const told = tell(one, one.picked), box = one.canvas.getBoundingClientRect();
  showTip(box.left + gantt.left + (Math.max(begin, one.time.begin) - one.time.begin) * scaleOf(one), box.top + list.top + list.high, told.title, told.entries);
  say(told.title + ", " + told.entries.map(entry => entry.join(" ")).join(", "));
  drawGantt();
}
function walk(one, key) {
  const now = one.picked;
  if (!now) {
    const first = one.rows.findIndex(row => row.bars.length);
    if (first >= 0) pick(one, first, 0);
    return;
  }
  const row = one.rows[now.row];
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const next = now.bar + (key === "ArrowRight" ? row.width : -row.width);
    if (next >= 0 && next < row.bars.length) pick(one, now.row, next);
    return;
  }
  for (let r = now.row + (key === "ArrowDown" ? 1 : -1); r >= 0 && r < one.rows.length; r += key === "ArrowDown" ? 1 : -1)
    if (one.rows[r].bars.length) {
      const other = one.rows[r], at = Math.min(firstAfter(other, row.bars[now.bar + row.begin]), other.bars.length - other.width);
      return pick(one, r, at);
    }
}
function listen(one) {
  const { canvas } = one;
  let drag = null;
  canvas.addEventListener("wheel", event => {
    const px = event.clientX - canvas.getBoundingClientRect().left;
    if (px < gantt.left) return;  // over the names of the ranks the page scrolls
    event.preventDefault();
    const { time } = one, length = time.end - time.begin;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey)
      place(time, time.begin + (event.deltaX || event.deltaY) / 800 * length, length);
    else
      zoom(time, Math.exp(Math.max(-200, Math.min(200, event.deltaY)) * 0.0025), time.begin + (px - gantt.left) / scaleOf(one));
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => {
    drag = { x: event.clientX, begin: one.time.begin, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
    if (drag) place(one.time, drag.begin - (event.clientX - drag.x) / scaleOf(one), one.time.end - one.time.begin);
    const box = canvas.getBoundingClientRect(), found = barAt(one, event.clientX - box.left, event.clientY - box.top);
    gantt.hover = null;
    if (found) {
      const told = tell(one, found);
      gantt.hover = { microbatch: told.microbatch, time: found.time, on: one.time };
      showTip(event.clientX, event.clientY, told.title, told.entries);
    } else {
      hideTip();
    }
    drawGantt();
  });
  canvas.addEventListener("pointerup", event => {
    const box = canvas.getBoundingClientRect(), found = barAt(one, event.clientX - box.left, event.clientY - box.top);
    if (drag && !drag.moved && one.track) {
      const told = found ? tell(one, found).microbatch : null;
      trace(told === gantt.traced ? null : told);
    }
    drag = null;
  });
  const leave = () => { gantt.hover = null; drag = null; hideTip(); drawGantt(); };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("pointercancel", leave);
  canvas.addEventListener("blur", () => { one.picked = null; hideTip(); drawGantt(); });
  canvas.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { key } = event;
    if (key === "+" || key === "=") zoom(one.time, 0.5, middle(one.time));
    else if (key === "-") zoom(one.time, 2, middle(one.time));
    else if (key === "0") showAll(one.time);
    else if (key.startsWith("Arrow")) walk(one, key);
    else if (key === "Enter" && one.picked && one.track) trace(tell(one, one.picked).microbatch);
    else if (key === "Escape") { one.picked = null; hideTip(); if (one.track) trace(null); }
    else return;
    event.preventDefault();
  });
}
