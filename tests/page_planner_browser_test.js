// page_planner_browser_test.js PAGE PROBE PICTURES AXE: the planner's own page in Chromium, as page_browser_test.cpp looks at the
// others. Chromium is spoken to over a pipe: what a worker takes to answer is not in a page's virtual time. AXE is the file of
// axe-core where it was had. Skipped (77) where there is no Chromium.
"use strict";
const { spawn, spawnSync } = require("child_process"), fs = require("fs"), os = require("os"), path = require("path"), assert = require("assert");
const [page, probe, pictures, axe] = process.argv.slice(2);
const browser = ["chromium", "chromium-browser", "google-chrome"].find(name => spawnSync("sh", ["-c", `command -v ${name}`]).status === 0);
if (!browser) {
  console.log("there is no chromium here");
  process.exit(77);
}
const profile = fs.mkdtempSync(path.join(os.tmpdir(), "page-browser-"));
const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--enable-blink-features=ComputedAccessibilityInfo", `--user-data-dir=${profile}`];
const chromium = spawn(browser, flags, { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });

const waiting = new Map(), said = [];
let last = 0, session, heard = "";
const send = (method, params = {}) => new Promise((resolve, reject) => {
  waiting.set(++last, { resolve, reject, method });
  chromium.stdio[3].write(JSON.stringify({ id: last, method, params, sessionId: session }) + "\0");
});
chromium.on("exit", status => { for (const one of waiting.values()) one.reject(new Error(`chromium ended with ${status} at ${one.method}`)); });
chromium.stdio[4].setEncoding("utf8").on("data", text => {
  const parts = (heard + text).split("\0");
  heard = parts.pop();
  for (const part of parts) {
    const { id, error, result, method, params } = JSON.parse(part);
    if (id) error ? waiting.get(id).reject(new Error(error.message)) : waiting.get(id).resolve(result);
    if (id) waiting.delete(id);
    if (method === "Runtime.exceptionThrown") said.push(params.exceptionDetails.text);
    if (method === "Runtime.consoleAPICalled" && ["error", "warning"].includes(params.type)) said.push(params.args.map(one => one.value || one.description).join(" "));
    if (method === "Log.entryAdded" && params.entry.level === "error") said.push(params.entry.text);
  }
});
const value = async expression => {
  const { result, exceptionDetails } = await send("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
  if (exceptionDetails) throw new Error(exceptionDetails.exception ? exceptionDetails.exception.description : exceptionDetails.text);
  return result.value;
};
// Until a question has its answer, in words or in drawings; a plan's survey comes last.
const answered = `new Promise(resolve => (function look() {
  const main = document.getElementById("main"), trouble = document.querySelector(".trouble");
  if (document.querySelector("form") && !main.hasAttribute("aria-busy") && !planner.isBusy) resolve(trouble.textContent); else setTimeout(look, 20);
})())`;

async function look() {
  const { targetId } = await send("Target.createTarget", { url: "about:blank" });
  ({ sessionId: session } = await send("Target.attachToTarget", { targetId, flatten: true }));
  for (const domain of ["Page", "Runtime", "Log"]) await send(`${domain}.enable`);
  for (const file of [axe, probe]) if (fs.existsSync(file)) await send("Page.addScriptToEvaluateOnNewDocument", { source: fs.readFileSync(file, "utf8") });
  fs.mkdirSync(pictures, { recursive: true });
  // Each width in both schemes; the sections themselves are those of plan --html and simulate --format html.
  const looks = first => [360, 800, 1440, 2560].map((width, i) => [width, (i % 2 === 1) === first]);
  for (const [name, all, state, sections] of [
    ["planner-plan", looks(true), "verb=plan&model=llama-3-70b&gpus=64", ["chosen", "plans", "left-out", "sizes", "front", "time", "rank-memory", "schedules", "memory", "mesh", "words"]],
    ["planner-simulate", looks(false), "verb=simulate&compare=1f1b,zb-h2,dualpipe&pp=4", ["numbers", "schedules", "memory", "front"]],
    ["planner-trouble", [[360, false], [1440, true]], "verb=plan&gpus=64&tp=5", null]]) {
    await send("Page.navigate", { url: "about:blank" });
    await send("Page.navigate", { url: `file://${path.resolve(page)}#${state}` });
    const trouble = await value(answered);
    assert.strictEqual(Boolean(trouble), !sections, `${name}: ${trouble}`);
    for (const [width, dark] of all) {
      await send("Emulation.setDeviceMetricsOverride", { width, height: 900, deviceScaleFactor: 1, mobile: false });
      await send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }] });
      await value("wrong.length = 0, scrollTo(0, 0), new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn))).then(() => 0)");
      const { data } = await send("Page.captureScreenshot", { captureBeyondViewport: true });
      fs.writeFileSync(path.join(pictures, `${name}-${width}-${dark ? "dark" : "light"}.png`), Buffer.from(data, "base64"));
      const found = await value("probe()"), where = `${name}, ${width} pixels, ${dark ? "dark" : "light"}: ${found}`;
      assert.ok(found.startsWith(`${width} sections `) && found.endsWith("wrong: ;"), where);
      for (const section of sections || []) assert.ok(found.includes(` ${section}`), `${section}: ${where}`);
    }
  }
  assert.deepStrictEqual(said, []);
}
look().then(() => console.log(`the planner's page is sound${fs.existsSync(axe) ? "" : "; axe-core was not there to say so too"}`),
  error => { console.error(error.message); process.exitCode = 1; }).finally(() => {
  chromium.removeAllListeners("exit");
  chromium.on("exit", () => fs.rmSync(profile, { recursive: true, force: true }));
  chromium.kill();
});
