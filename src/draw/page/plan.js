// What plan --html shows besides timelines and memory.
const seconds = value => amount("s", value, 4), bytes = value => amount("B", value, 4);
// What a reason of the search says of those it left out.
const reasonWords = { memory: "does not fit in memory", schedule: "does not suit its schedule", shape: "has sizes that do not go together",
                      slower: "is too slow by a lower bound", same: "is a duplicate" };
// What became of a plan that was considered, in the order of plan/search.h: words, and what its figure is.
const fates = [["simulated", figure => "a step of " + seconds(figure)], ["fits, but is too slow", figure => `a step of at least ${seconds(figure)}`],
  ["fits, and as many plans are as fast and as small", figure => `a step of at least ${seconds(figure)}`], ["fits, and holds more than those that are ranked", figure => bytes(1e6 * figure)],
  [reasonWords.slower, figure => `a step of at least ${seconds(figure)}`], [reasonWords.memory, figure => `${bytes(1e6 * figure)} of ${bytes(data.machine.usable_bytes)} usable`],
  [reasonWords.schedule, why => data.looked.whys[why]], [reasonWords.shape, why => data.looked.whys[why]], [reasonWords.same, () => "its balanced split is the even one"]];
const causes = [
  ['compute', 'computation', '--compute'], ['tp_exposed', 'tensor-parallel collectives', '--axis-tp'],
  ['pp_bubble', 'pipeline bubble and hand-overs', '--axis-pp'],
  ['dp_exposed', 'gradient reduction and gathers not hidden', '--axis-dp'],
  ['cp_exposed', 'context-parallel exchange not hidden', '--axis-cp'],
  ['ep_exposed', 'experts\' all-to-all not hidden', '--axis-ep'],
  ['host_exposed', 'the way to the host and back not hidden', '--axis-host'],
  ['optimizer', 'optimizer step', '--optimizer'],
  ['other', 'stragglers and the step\'s own overhead', '--other']
];

function planOverview() {
  const best = data.answer.plans[0];
  const box = section("chosen", "The chosen plan", "");
  box.classList.add("full");
  box.append(el("p", {}, el("span", { class: "badge" }, "chosen"), " ", planWords(data.plans[0].summary)), facts([
    ["a step", seconds(best.step_seconds), `80% between ${seconds(best.step_seconds_p10)} and ${seconds(best.step_seconds_p90)}`],
    ["tokens/s per GPU", show(best.tokens_per_second_per_gpu, 4), show(best.model_tflops_per_gpu, 4) + " TFLOP/s of the model"],
    ["MFU", amount("%", best.mfu, 3)],
    ["memory", bytes(best.memory_bytes.total), "of " + bytes(data.machine.usable_bytes) + " usable"],
    ["pipeline bubble", amount("%", best.bubble_fraction, 3)],
    ["GPUs", String(data.machine.gpus), data.machine.name + ", " + data.machine.node + " in a node"]]),
    el("p", { class: "soft" }, "The command that prices this plan alone:"), command(data.plans[0].command));
}

// In place of the chosen plan.
function planNothing() {
  const box = section("chosen", "No plan fits", ""), { nearest } = data.answer;
  box.classList.add("full");
  box.append(el("p", { style: "overflow-wrap:anywhere;white-space:pre-line" }, data.nothing));
  if (!nearest) return;
  const used = data.categories.filter(name => nearest.memory_bytes[name] > 0), most = data.categories.map((name, c) => [name, c]).filter(([name]) => used.includes(name));
  box.append(facts([["the nearest needs", bytes(nearest.bytes), "on the rank that holds most"], ["usable", bytes(nearest.usable_bytes), "of a device"], ["too much", bytes(nearest.bytes - nearest.usable_bytes)],
      ["GPUs", String(data.machine.gpus), data.machine.name + ", " + data.machine.node + " in a node"]]),
    stacks(most.map(([name, c]) => ({ name, colour: `var(${memoryColours[c]})` })), [{ name: nearest.plan, parts: used.map(name => nearest.memory_bytes[name]) }], "B", { value: nearest.usable_bytes, name: "usable" }),
    asTable("Its memory", "What the nearest plan holds on that rank", ["category", "memory"], [...used, "total"].map(name => [name, bytes(nearest.memory_bytes[name])])));
}

function planTable() {
  const answer = data.answer, box = section("plans", "Plans, and why not the others", "");
  box.classList.add("full");
  const detail = el("div", { "aria-live": "polite" });
  const pickPlan = i => {
    detail.replaceChildren(el("h3", {}, data.plans[i].summary),
      data.plans[i].why_not ? el("pre", { class: "wide", tabindex: 0, role: "region", "aria-label": "Why not" }, data.plans[i].why_not) : el("p", {}, "This is the chosen plan."), command(data.plans[i].command));
  };
  box.append(table(`${count(answer.considered, "configuration")} considered, ${answer.simulated} simulated; plans of the same rank (=) are too close to tell apart`,
    ["rank", "plan", "step", "P10 to P90", "MFU", "bubble", "memory", "tokens/s/GPU", "more"],
    answer.plans.map((p, i) => [el("span", {}, p.rank + (p.rank_is_shared ? "=" : ""), i === 0 ? " " : "", i === 0 ? el("span", { class: "badge" }, "chosen") : null),
      data.plans[i].summary, seconds(p.step_seconds), `${seconds(p.step_seconds_p10)} to ${seconds(p.step_seconds_p90)}`, amount("%", p.mfu, 3), amount("%", p.bubble_fraction, 3),
      bytes(p.memory_bytes.total), show(p.tokens_per_second_per_gpu, 4),
      el("button", { type: "button", "aria-label": `${i === 0 ? "Command" : "Why not, and the command"}: ${data.plans[i].summary}`, onclick: () => pickPlan(i) }, i === 0 ? "command" : "why not")]),
    { plan: 1, chosen: 0 }), detail);
}

// Every alternative, with what became of it.
function planLooked() {
  const { answer, looked } = data, perPage = 20;
  const box = section("left-out", "Every alternative, and why not", "");
  box.classList.add("full");
  const rejected = Object.entries(answer.rejected).filter(([, n]) => n > 0);
  if (rejected.length)
    box.append(table("What the search left out, by its reason, with an example of each kind", ["reason", "configurations", "examples"],
      rejected.map(([reason, n]) => [reasonWords[reason] || reason, String(n),
        el("div", {}, (answer.examples[reason] || []).map(example => el("div", {}, example)))]), { long: [2] }));
  const rows = [];  // [group, place in it or -1, fate]
  looked.groups.forEach((group, g) => {
    if (!Array.isArray(group[9])) rows.push([g, -1, group[10]]);
    else for (let k = 0; k < group[11].length; k += 2) rows.push([g, k, group[11][k]]);
  });
  if (!rows.length) return;
  const wordsOf = g => {
    const [dp, tp, pp, cp, kind, ep, etp, batch, recompute] = looked.groups[g], list = [["dp", dp], ["tp", tp], ["pp", pp]];
    if (cp > 1) list.push(["cp", cp], ["cp-kind", kind]);
    if (ep > 1) list.push(["ep", ep]);
    if (ep > 1 && etp > 1) list.push(["etp", etp]);
    if (batch) list.push(["micro-batch", batch]);
    if (recompute >= 0) list.push(["recompute", looked.recomputes[recompute]]);
    return list.map(([name, value]) => name + "=" + value).join(" ");
  };
  const known = new Map(), words = ([g, k]) => {
    if (!known.has(g)) known.set(g, wordsOf(g));
    if (k < 0) return known.get(g);
    const [, , , , , , , , , runs, shards] = looked.groups[g], one = k / 2;
    return `${known.get(g)} ${looked.pipelines[runs[Math.floor(one / shards.length)]]} ${looked.shardings[shards[one % shards.length]]}`;
  };
  const figure = ([g, k, fate]) => fates[fate][1](k < 0 ? looked.groups[g][11] : looked.groups[g][11][k + 1]);
  const many = ([g, k]) => k < 0 ? looked.groups[g][9] : 1;
  let fate = "", asked = [], from = 0, found = rows;
  const list = el("div"), place = el("span", { role: "status" });
  const button = (text, name, by) => el("button", { type: "button", "aria-label": name, onclick: () => { from = by(); draw(); } }, text);
  const last = () => Math.max(0, Math.floor((found.length - 1) / perPage) * perPage);
  const steps = [button("first", "First alternatives", () => 0), button("previous", "Previous alternatives", () => Math.max(0, from - perPage)),
    button("next", "Next alternatives", () => Math.min(last(), from + perPage)), button("last", "Last alternatives", last)];
  const draw = () => {
    const shown = found.slice(from, from + perPage), plans = found.reduce((sum, row) => sum + many(row), 0);
    place.textContent = found.length ? `${from + 1} to ${from + shown.length} of ${count(found.length, "row")}, ${count(plans, "configuration")}` : "No alternative is like this.";
    steps.forEach((one, k) => { one.disabled = k < 2 ? from === 0 : from >= last(); });
    list.replaceChildren(shown.length ? table("Alternatives that were rejected together share a row", ["configuration", "outcome", "details", "how many"],
      shown.map(row => [words(row), fates[row[2]][0], figure(row), String(many(row))]), { texts: 3, long: [0, 2] }) : "");
  };
  const sift = () => {
    from = 0;
    found = rows.filter(row => (fate === "" || row[2] === +fate) && (!asked.length || (here => asked.every(one => here.includes(one)))(` ${words(row)} `)));
    draw();
  };
  const used = fates.map(([name], k) => [k, name]).filter(([k]) => rows.some(row => row[2] === k));
  const filter = el("input", { placeholder: "tp=8, schedule=zb-v", autocomplete: "off", style: "width:15em;max-width:100%" });
  filter.addEventListener("input", () => { asked = filter.value.split(/[\s,]+/).filter(one => one).map(one => one.includes("=") ? ` ${one} ` : one); sift(); });
  box.append(el("h3", {}, "One by one"), el("p", { class: "soft" }, `In the order in which the search looked at them.${looked.told < answer.considered ? ` The first ${looked.told} of ${answer.considered} are here; the table above counts all.` : ""}`),
    el("div", { class: "bar" }, choice("outcome", [["", "any"], ...used], "", value => { fate = value; sift(); }), el("label", {}, "with", filter), el("span", { class: "buttons" }, steps), place), list);
  draw();
}

function planTime() {
  const part = (p, key) => p.time_seconds[key] > 1e-9 * p.step_seconds ? p.time_seconds[key] : 0;  // less is what rounding leaves of a difference
  const answer = data.answer, used = causes.filter(([key]) => answer.plans.some(p => part(p, key) > 0));
  const box = section("time", "Where the seconds of a step go", "On the pipeline rank that waits least; they add up to the step.");
  box.append(stacks(used.map(([, name, colour]) => ({ name, colour: `var(${colour})` })),
    answer.plans.map((p, i) => ({ name: data.plans[i].summary, plan: true, chosen: i === 0, parts: used.map(([key]) => part(p, key)) })), "s"),
    asTable("Time by cause", "Seconds of a step by cause", ["plan", ...used.map(([, name]) => name)],
      answer.plans.map((p, i) => [data.plans[i].summary, ...used.map(([key]) => seconds(part(p, key)))]), { plan: 0, chosen: 0 }));
}

function planRankMemory() {
  const box = section("rank-memory", "Peak memory of each pipeline rank", "");
  const used = data.categories.map((name, c) => [name, c]).filter(([, c]) => data.plans.some(p => p.rank_memory.some(m => m[c] > 0)));
  const inside = el("div");
  const showPlan = i => inside.replaceChildren(
    stacks(used.map(([name, c]) => ({ name, colour: `var(${memoryColours[c]})` })),
      data.plans[i].rank_memory.map((m, r) => ({ name: "pipeline rank " + r, parts: used.map(([, c]) => m[c]) })), "B", { value: data.machine.usable_bytes, name: "usable" }),
    asTable("Memory", "Peak memory of each pipeline rank, by category", ["pipeline rank", ...used.map(([name]) => name), "together"],
      data.plans[i].rank_memory.map((m, r) => [String(r), ...used.map(([, c]) => bytes(m[c])), bytes(m.reduce((a, b) => a + b, 0))])));
  box.append(el("div", { class: "bar" }, choice("plan", data.plans.map((p, i) => [i, (i === 0 ? "chosen: " : "") + p.summary]), 0, i => showPlan(+i))), inside);
  showPlan(0);
}

function planFront(box) {
  const { front } = data.survey, best = data.answer.plans[0];
  if (!front.length) {
    box.append(el("p", { class: "soft" }, "No plan fits."));
    return;
  }
  box.append(el("p", { class: "soft" },
    `The line joins the fastest plans in less and less memory, in steps of at least ${amount("%", data.survey.front_step, 2)} of the device's memory. Of plans within ${amount("%", data.survey.tie, 2)} of each other, the one with the least memory counts. Except within a step, no plan is faster in as little memory.`));
  const entries = p => [["step", seconds(p.step_seconds)], ["memory", bytes(p.memory_bytes)], ["MFU", amount("%", p.mfu, 3)]];
  const detail = el("div", { "aria-live": "polite" });
  const sorted = [...front].sort((a, b) => a.memory_bytes - b.memory_bytes);
  const stairs = sorted.map(p => [p.memory_bytes, p.step_seconds, p.summary, entries(p), false, p.command]);
  const ranked = data.answer.plans.map((p, i) => [p.memory_bytes.total, p.step_seconds, (i === 0 ? "chosen: " : "") + data.plans[i].summary,
    entries({ ...p, memory_bytes: p.memory_bytes.total }), i === 0, data.plans[i].command]);
  const cells = data.survey.cells.filter(c => c.plan).map(c => [c.plan.memory_bytes, c.plan.step_seconds, c.plan.summary, entries(c.plan), false, c.plan.command]);
  chart(box, { label: "Step time over memory of the plans", x: { name: "memory of the rank with most", kind: "B", zero: true }, y: { name: "step", kind: "s", log: Math.max(...cells.map(c => c[1]), best.step_seconds) > 4 * best.step_seconds },
    high: 340, limit: { x: data.machine.usable_bytes, label: "usable" }, click: p => detail.replaceChildren(el("h3", {}, p[2]), command(p[5])),
    series: [{ name: "best of each tp and pp", kind: "dots", colour: () => css("--communication"), points: cells },
      { name: "front", kind: "stairs", marked: true, colour: () => css("--accent"), points: stairs },
      { name: "ranked plans; the chosen one is ringed", kind: "dots", colour: () => css("--activations"), points: ranked }] });
  box.append(detail, asTable("The front", "The fastest plan for each memory", ["plan", "memory", "step", "MFU"],
    sorted.map(p => [p.summary, bytes(p.memory_bytes), seconds(p.step_seconds), amount("%", p.mfu, 3)]), { plan: 0 }));
}

function planHeat(box) {
  const best = data.answer.plans[0], isBest = c => best && best.tp === c.tp && best.pp === c.pp;
  const chosen = best && { ...best, summary: data.plans[0].summary, command: data.plans[0].command };
  const cells = data.survey.cells.map(c => isBest(c) ? { ...c, plan: chosen } : c);
  const tps = [...new Set(cells.map(c => c.tp))].sort((a, b) => a - b), pps = [...new Set(cells.map(c => c.pp))].sort((a, b) => a - b);
  const times = cells.filter(c => c.plan).map(c => c.plan.step_seconds), least = Math.min(...times), most = Math.max(...times);
  const detail = el("div", { "aria-live": "polite" });
  const why = c => c.plan ? `${c.plan.summary}: ${seconds(c.plan.step_seconds)}, ${amount("%", c.plan.step_seconds / least - 1, 3)} above the fastest size` : c.refusal || "no configuration has a legal shape and schedule";
  const open = c => {
    detail.replaceChildren(el("h3", {}, `tp ${c.tp}, pp ${c.pp}`), el("p", {}, why(c)));
    for (const [reason, { count: n, examples }] of Object.entries(c.rejected || {}))
      detail.append(el("p", { class: "soft" }, `${n}: ${reasonWords[reason] || reason}${examples && examples.length ? ", as " + examples[0] : ""}`));
    if (c.plan) detail.append(command(c.plan.command));
  };
  const cell = (tp, pp) => {
    const c = cells.find(one => one.tp === tp && one.pp === pp);
    if (!c) return el("td", {}, "");
    const depth = c.plan ? (most > least ? Math.log(most / c.plan.step_seconds) / Math.log(most / least) : 1) : 0;
    const isChosen = isBest(c);
    return el("td", {}, el("button", { type: "button", class: !c.plan ? "none" : isChosen ? "chosen" : null, title: why(c), onclick: () => open(c),
      style: c.plan ? `background:rgba(var(--heat),${(0.06 + 0.34 * depth).toFixed(3)})` : null, "aria-label": `tp ${tp}, pp ${pp}${isChosen ? ", the chosen plan's" : ""}: ${why(c)}` },
      c.plan ? seconds(c.plan.step_seconds) : "none"));
  };
  box.append(el("p", { class: "soft" }, (times.length ? `Stronger colour is faster: ${seconds(most)} to ${seconds(least)}. Of plans within ${amount("%", data.survey.tie, 2)} of each other, a cell shows the one with the least memory; the framed cell shows the chosen plan. "none" means that no plan exists.` : "No size has a plan.") +
      (data.survey.cells_left_out ? ` ${data.survey.cells_left_out} sizes with a tp beyond a node are left out.` : "")),
    el("div", { class: "wide heat", role: "region", tabindex: 0, "aria-label": "Best step of each tp and pp" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "tp \\ pp"), pps.map(pp => el("th", { scope: "col" }, "pp " + pp)))),
      el("tbody", {}, tps.map(tp => el("tr", {}, el("th", { scope: "row" }, "tp " + tp), pps.map(pp => cell(tp, pp))))))), detail);
}

function planMesh() {
  const { sizes, ranks } = data.mesh, node = data.machine.node, axes = ["pp", "dp", "cp", "tp", "ep"], used = axes.filter(a => sizes[a] > 1);
  const box = section("mesh", "The mesh over its nodes", "");
  box.classList.add("full");
  const inside = el("div", { class: "mesh" }), all = data.machine.gpus, mostNodes = 32;
  const nodes = Math.ceil(all / node), drawn = Math.min(nodes, mostNodes, Math.ceil(ranks.length / node));
  const colourBy = axis => {
    const at = axes.indexOf(axis);
    inside.replaceChildren(...Array.from({ length: drawn }, (_, n) => el("div", { class: "node" }, "node " + n, el("div", {},
      ranks.slice(n * node, (n + 1) * node).map((place, i) => el("span", { style: axis ? `background:rgba(var(--heat),${(0.05 + 0.4 * place[at] / Math.max(1, sizes[axis] - 1)).toFixed(3)})` : null },
        el("b", {}, "rank " + (n * node + i)), used.map(a => `${a} ${place[axes.indexOf(a)]}`).join(" ")))))));
  };
  const first = used[0] || "";
  box.append(el("div", { class: "bar" }, used.length ? choice("colour by", used.map(a => [a, `${a}, of ${sizes[a]}`]), first, colourBy) : null),
    el("p", { class: "soft" }, `${axes.map(a => `${a} ${sizes[a]}`).join(", ")}; of each rank the axes that are larger than 1; stronger colour is a higher number.` +
      (drawn < nodes ? ` The first ${drawn} of ${nodes} nodes are drawn; the others go on in the same way.` : "")), inside);
  colourBy(first);
}

function planExplanation() {
  const box = section("words", "In words", "");
  box.classList.add("full");
  box.append(el("pre", { class: "wide", tabindex: 0, role: "region", "aria-label": "The explanation" }, data.explanation));
}

// What surrounds the answer: there, or still being computed, and then drawn by showSurvey().
const waiting = { fill: null };
function planSurvey() {
  const sizes = section("sizes", "Every tensor- and pipeline-parallel size", "The step time of the best plan for each pair of sizes. Select a cell to see its plan, or why there is none.");
  const front = section("front", "Step time against memory: the Pareto front", "");
  const fill = () => { planHeat(sizes); planFront(front); };
  waiting.fill = null;
  if (data.survey) return fill();
  const notes = [sizes, front].map(box => {
    const note = el("p", { class: "soft" }, "Being computed ...");
    box.append(note);
    box.setAttribute("aria-busy", "true");
    return note;
  });
  waiting.fill = () => {
    notes.forEach(note => { note.parentElement.removeAttribute("aria-busy"); note.remove(); });
    fill();
  };
}
function showSurvey(survey) {
  data.survey = survey;
  waiting.fill();
  drawAll();
}

function startPlan() {
  if (!data.answer.plans.length) {
    planNothing();
    planSurvey();
    planLooked();
    planExplanation();
    return;
  }
  planOverview();
  planTable();
  planSurvey();
  planTime();
  planRankMemory();
  schedulesSection();
  memorySection();
  planMesh();
  planLooked();
  planExplanation();
}
