// What a page does besides that `echelon view` serves: it asks for its document anew while it is looked at, and hands traces out.
// `data.served`: the document's tag, how long to wait, where traces are opened, the traces.
const live = { tag: data.served.tag, ended: false };

function servedSections() {
  const { traces, perfetto } = data.served;
  if (!traces.length) return;
  const box = section("traces", "Traces", `In Perfetto's own format: a row for what every rank did, its collectives and its optimizer's step among it. To open one hands it to a page of ${perfetto}, which loads from there; the trace stays in this browser.`);
  box.classList.add("full");
  const address = one => "trace/" + encodeURIComponent(one.name), note = el("p", { role: "status" });
  box.append(table("In this directory", ["trace", "size", "", ""], traces.map(one => [one.name, amount("B", one.bytes, 3),
    el("a", { href: address(one), download: one.name, "aria-label": "Download " + one.name }, "download"),
    el("button", { type: "button", "aria-label": "Open " + one.name + " in Perfetto", onclick: () => openTrace(one.name, address(one), perfetto, note) }, "open in Perfetto")])), note);
}
// Its page says PONG to a PING once it listens.
async function openTrace(title, address, perfetto, note) {
  const other = open(perfetto);
  if (!other) {
    note.textContent = "This browser opened no window: download the trace, and open it there.";
    return;
  }
  const buffer = await (await fetch(address)).arrayBuffer();
  const knock = setInterval(() => { if (other.closed) clearInterval(knock); else other.postMessage("PING", perfetto); }, 100);
  addEventListener("message", function heard(event) {
    if (event.source !== other || event.origin !== perfetto || event.data !== "PONG") return;
    clearInterval(knock);
    removeEventListener("message", heard);
    other.postMessage({ perfetto: { buffer, title } }, perfetto);
  });
}

// Draws another document, with what was open, chosen, in focus and in sight as it was.
function redrawWith(document) {
  const list = what => [...byId("main").querySelectorAll(what)], focused = list("a, button, select, input, summary, [tabindex]").indexOf(globalThis.document.activeElement);
  const opened = list("details").map(one => one.open), chosen = list("select").map(one => one.selectedIndex), at = [scrollX, scrollY];
  const seen = gantt.times.map(time => time.begin > 0 || time.end < time.span ? { ...time } : null);
  showDocument(document);
  list("details").forEach((one, i) => { one.open = opened[i] || false; });
  list("select").forEach((one, i) => { if (chosen[i] > 0 && chosen[i] < one.options.length && one.selectedIndex !== chosen[i]) { one.selectedIndex = chosen[i]; one.dispatchEvent(new Event("change")); } });
  gantt.times.forEach((time, i) => { if (seen[i]) place(time, seen[i].begin, seen[i].end - seen[i].begin); });
  if (focused >= 0) list("a, button, select, input, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
  scrollTo(...at);
}
async function follow() {
  if (!document.hidden) {
    try {
      const answer = await fetch("document.json", { headers: { "If-None-Match": live.tag }, cache: "no-store" });
      if (answer.status === 200) {
        live.tag = answer.headers.get("ETag");
        redrawWith(await answer.json());
      }
      if (live.ended) showState();
      live.ended = false;
    } catch (_) {
      if (!live.ended) showState("The server has ended; this is what it said last.");
      live.ended = true;
    }
  }
  setTimeout(follow, 1000 * data.served.wait_seconds);
}
function showState(text = "") {
  byId("controls").replaceChildren(text ? el("p", { class: "card trouble", role: "alert" }, text) : "");
}
extras.push(servedSections);
addEventListener("load", follow);
