// The page with the planner inside (make page): controls, and the same drawings of what it answers. Its state is the
// address: flags and their values.
const plannerFlags = {
  plan: [["model", "models"], ["machine", "machines"], ["software", "software"], ["precision", ["bf16", "fp8", "fp4", "f32"]], ["gpus", 64], ["global-batch", 512], ["seq-len", 8192],
    ["objective", ["time", "memory"]], ["dp"], ["tp"], ["pp"], ["cp"], ["ep"], ["micro-batch"], ["zero", ["", "0", "1", "2", "3"]], ["schedule", "schedules?"], ["recompute", ["", "none", "selective", "full"]], ["top", 10]],
  simulate: [["compare", "1f1b,interleaved,zb-h2,zb-v,dualpipev"], ["pp", 4], ["microbatches", 12], ["times", "1,1,1"], ["comm-time", 0], ["chunks"], ["overlap-factor"]],
};
const plannerDefaults = { plan: { model: "llama-3-70b", machine: "h100", software: "current" }, simulate: {} };
const planner = { module: null, start: null, verb: "plan", said: [] };

function startPlanner() {
  planner.start = data;
  if (["plan", "simulate"].includes(state.verb)) planner.verb = state.verb;
  const fields = el("div", { class: "controls" }), trouble = el("p", { role: "alert", class: "trouble" }), go = el("button", { type: "submit" }, "Run");
  const form = el("form", { class: "card", "aria-label": "What to plan or simulate" }, el("div", { class: "bar" },
    choice("verb", [["plan", "plan: find the fastest configuration"], ["simulate", "simulate: compare pipeline schedules"]], planner.verb, verb => { planner.verb = verb; fill(); }), go), fields, trouble);
  const fill = () => fields.replaceChildren(...plannerFlags[planner.verb].map(([flag, values]) => {
    const fallback = plannerDefaults[planner.verb][flag] || (Array.isArray(values) ? values[0] : typeof values === "string" && !planner.start[values.replace("?", "")] ? values : typeof values === "number" ? values : "");
    const now = state.verb === planner.verb && state[flag] !== undefined ? state[flag] : fallback;
    const list = Array.isArray(values) ? values : typeof values === "string" && planner.start[values.replace("?", "")] ? (values.endsWith("?") ? [""] : []).concat(planner.start[values.replace("?", "")]) : null;
    const input = list ? el("select", { name: flag }, list.map(v => el("option", { value: v, selected: v === now }, v === "" ? "searched" : v)))
                       : el("input", { name: flag, value: now, placeholder: values === undefined ? "searched" : "", autocomplete: "off" });
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
    trouble.textContent = "";
    go.disabled = true;
    byId("main").setAttribute("aria-busy", "true");
    setTimeout(() => {
      try {
        showDocument(answerOf(words));
        say("Done");
      } catch (error) {
        trouble.textContent = error.message;
      }
      go.disabled = false;
      byId("main").removeAttribute("aria-busy");
    }, 20);  // so that the button is seen pressed
  };
  byId("controls").replaceChildren(form);
  fill();
  globalThis.EchelonPlanner({ noInitialRun: true, print: text => planner.said.push(text), printErr: text => planner.said.push(text) })
    .then(module => { planner.module = module; run(); }, error => { trouble.textContent = "The planner did not start: " + error; });
}

// The document that `echelon WORDS` draws; an Error with its sentence where it refuses.
function answerOf(words) {
  planner.said = [];
  const file = "/page.html", how = words[0] === "plan" ? ["--html", file] : ["--format", "html", "--out", file], { FS } = planner.module;
  if (FS.analyzePath(file).exists) FS.unlink(file);
  const status = planner.module.callMain([...words, ...how]);
  if (!FS.analyzePath(file).exists) throw new Error(planner.said.filter(line => line).slice(-1)[0] || "the planner ended with status " + status);
  const html = FS.readFile(file, { encoding: "utf8" }), mark = 'id="' + 'data">', begin = html.indexOf(mark) + mark.length;
  const plain = word => /^[\w\-+=.,:\/@%]+$/.test(word) ? word : "'" + word.replaceAll("'", "'\\''") + "'";
  return { ...JSON.parse(html.slice(begin, html.indexOf("</" + "script>", begin))), command: ["echelon", ...words.map(plain)].join(" ") };
}
