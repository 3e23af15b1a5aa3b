// The page's head, then the sections of its kind.
function start() {
  byId("head").append(el("h1", {}, data.title), data.subtitle ? el("p", { class: "soft" }, data.subtitle) : "", data.command ? command(data.command) : "");
  const timeline = () => { schedulesSection(); doneSection(); };
  ({ plan: startPlan, simulate: startSimulate, timeline, run: startRun })[data.kind]();
  startGantt();
  const drawAll = () => redraws.forEach(draw => draw());
  drawAll();
  let waits = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waits); waits = requestAnimationFrame(drawAll); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("scroll", hideTip, { passive: true });
}
