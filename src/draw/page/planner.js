// The page with the planner inside (make page): controls, and the same drawings of what it answers. Its state is the
// address: flags and their values.
const plannerFlags = {
  plan: [["model", "models"], ["machine", "machines"], ["software", "software"], ["precision", ["bf16", "fp8", "fp4", "f32"]], ["gpus", 64], ["global-batch", 512], ["seq-len", 8192],
    ["objective", ["time", "memory"]], ["dp"], ["tp"], ["pp"], ["cp"], ["ep"], ["micro-batch"], ["zero", ["", "0", "1", "2", "3"]], ["schedule", "schedules?"], ["recompute", ["", "none", "selective", "full"]], ["top", 10]],
  simulate: [["compare", "1f1b,interleaved,zb-h2,zb-v,dualpipev"], ["pp", 4], ["microbatches", 12], ["times", "1,1,1"], ["comm-time", 0], ["chunks"], ["overlap-factor"]],
};
const plannerDefaults = { plan: { model: "llama-3-70b", machine: "h100", software: "current" }, simulate: {} };
const planner = { worker: null, isBusy: false, start: null, verb: "plan" };

function startPlanner() {
  planner.start = data;
  if (["plan", "simulate"].includes(state.verb)) planner.verb = state.verb;
  const fields = el("div", { class: "controls" }), trouble = el("p", { role: "alert", class: "trouble" }), took = el("p", { class: "soft" }), go = el("button", { type: "submit" }, "Run");
  const form = el("form", { class: "card", "aria-label": "What to plan or simulate" }, el("div", { class: "bar" },
    choice("verb", [["plan", "plan: find the fastest configuration"], ["simulate", "simulate: compare pipeline schedules"]], planner.verb, verb => { planner.verb = verb; fill(); }), go), fields, trouble, took);
  const unset = () => planner.verb === "plan" ? "searched" : "default";
  const fill = () => fields.replaceChildren(...plannerFlags[planner.verb].map(([flag, values]) => {
    const fallback = plannerDefaults[planner.verb][flag] || (Array.isArray(values) ? values[0] : typeof values === "string" && !planner.start[values.replace("?", "")] ? values : typeof values === "number" ? values : "");
    const now = state.verb === planner.verb && state[flag] !== undefined ? state[flag] : fallback;
    const known = Array.isArray(values) ? values : typeof values === "string" && planner.start[values.replace("?", "")] ? (values.endsWith("?") ? [""] : []).concat(planner.start[values.replace("?", "")]) : null;
    const list = known && !known.includes(now) ? [...known, now] : known;  // an address asks for it: the planner says what is legal
    const input = list ? el("select", { name: flag }, list.map(v => el("option", { value: v, selected: v === now }, v === "" ? unset() : v)))
                       : el("input", { name: flag, value: now, placeholder: values === undefined ? unset() : "", autocomplete: "off" });
    return el("label", {}, "--" + flag, input);
  }));
  form.addEventListener("submit", event => { event.preventDefault(); run(); });
  const run = () => {
    const words = [planner.verb], kept = { verb: planner.verb };
    for (const input of fields.querySelectorAll("[name]")) {
      const value = input.value.trim();
      if (value === "" || (input.name === "comm-time" && value === "0")) continue;
      words.push("--" + input.name, value);
      kept[input.name] = value;
    }
    for (const key of Object.keys(state)) delete state[key];
    Object.assign(state, kept);
    keepState("verb", planner.verb);
    trouble.textContent = took.textContent = "";
    go.disabled = true;
    byId("main").setAttribute("aria-busy", "true");
    const begin = performance.now(), done = () => { go.disabled = false; byId("main").removeAttribute("aria-busy"); };
    ask(words, answer => {
      if (answer.trouble) {
        trouble.textContent = answer.trouble;
        done();
      } else if (answer.document) {
        showDocument({ ...JSON.parse(answer.document), command: commandOf(words) });
        took.textContent = `Answered in ${amount("s", (performance.now() - begin) / 1000, 3)}.`;
        say("Done");
        done();
      } else {
        showSurvey(JSON.parse(answer.survey));
      }
    });
  };
  byId("controls").replaceChildren(form);
  fill();
  run();
}

// The answers of a worker, as they come. One that still works on what was asked before is ended.
function ask(words, answered) {
  if (planner.isBusy || !planner.worker) {
    if (planner.worker) planner.worker.terminate();
    const code = document.querySelector("script[type='text/plain']").textContent;
    const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    planner.worker = new Worker(address);
    URL.revokeObjectURL(address);
  }
  planner.isBusy = true;
  planner.worker.onmessage = event => {
    planner.isBusy = !event.data.trouble && !event.data.survey && !(event.data.document && words[0] !== "plan");
    answered(event.data);
  };
  planner.worker.onerror = event => {
    planner.worker.terminate();
    planner.worker = null;
    answered({ trouble: "The planner's worker ended: " + (event.message || "this browser starts none for this page") });
  };
  planner.worker.postMessage({ words });
}
function commandOf(words) {
  const plain = word => /^[\w\-+=.,:\/@%]+$/.test(word) ? word : "'" + word.replaceAll("'", "'\\''") + "'";
  return ["echelon", ...words.map(plain)].join(" ");
}
