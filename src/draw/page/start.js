// A document on the page: its head, then the sections of its kind.
function drawAll() { redraws.forEach(draw => draw()); }
function showDocument(document) {
  data = document;
  redraws.length = 0;
  Object.assign(gantt, { canvases: [], hover: null, traced: null, times: [] });
  for (const id of ["head", "sections", "main"]) byId(id).replaceChildren();
  byId("head").append(el("h1", {}, data.title), data.subtitle ? el("p", { class: "soft" }, data.subtitle) : "", data.command ? command(data.command) : "");
  const timeline = () => { schedulesSection(); doneSection(); };
  ({ plan: startPlan, simulate: startSimulate, timeline, run: startRun, waiting: () => {}, planner: startPlanner })[data.kind]();
  extras.forEach(add => add());
  startGantt();
  drawAll();
}
function start() {
  showDocument(data);
  let waits = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waits); waits = requestAnimationFrame(drawAll); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("scroll", hideTip, { passive: true });
}
