// What all drawings of the page share: elements, numbers as text, tips, tables, what is read out.
const byId = id => document.getElementById(id);
let data = JSON.parse(byId("data").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const redraws = [];  // of what must be drawn again when sizes or colours change
const extras = [];   // sections that stand after those of every page of a kind

function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}
function shape(name, attributes = {}, text) {
  const element = document.createElementNS(byId("space").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const show = (x, digits = 7) => String(+Number(x).toPrecision(digits));
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find(step => step * power >= least * 0.999999) || 10);
}
// What `size` and its like are written in: a unit, and how many of the number's own make it.
function unitFor(kind, size) {
  const pick = list => list.find(([, of]) => size >= of) || list[list.length - 1];
  if (kind === "s") return pick([["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]);
  if (kind === "B") return pick([["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]);
  if (kind === "%") return ["%", 0.01];
  if (kind === "/s") return pick([["M/s", 1e6], ["k/s", 1e3], ["/s", 1]]);
  return [kind, 1];
}
// "3.25 ms"
function amount(kind, value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(+value)) return "none";
  const [unit, of] = unitFor(kind, Math.abs(value) || 1);  // nothing is 0 s, not 0 ns
  return show(value / of, digits) + (unit === "%" ? "%" : unit ? " " + unit : "");
}
// A plan in words, which a line does not break within a field ("ZeRO 1"), but where a phone's would not hold it.
const planWords = text => text.split(", ").flatMap((field, i, all) => {
  const words = field + (i + 1 < all.length ? "," : "");
  return [i ? " " : null, el("span", { class: words.length <= 24 ? "whole" : null }, words)];
});
const count = (n, one, many = one + "s") => n + " " + (n === 1 ? one : many);
const timeUnit = () => data.time_unit;
const timeName = () => data.time_unit === "s" ? "time" : "time, in units of --times";
const memoryName = () => data.memory_unit === "B" ? "memory" : "activations of a full stage";

function say(text) { byId("said").textContent = text; }

// ---- tips: a title, then names and values by turns
function showTip(x, y, title, entries) {
  const tip = byId("tip");
  tip.replaceChildren(el("b", {}, title), el("table", { role: "presentation" },
    entries.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, String(value))))));
  tip.hidden = false;
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(x + 16, innerWidth - wide - 8)) + "px";
  tip.style.top = Math.max(4, y + 16 + high > innerHeight ? y - high - 10 : y + 16) + "px";
}
function hideTip() { byId("tip").hidden = true; }

// ---- sections
function section(id, title, about, ...children) {
  const head = el("h2", { id: id + "-title" }, title);
  const box = el("section", { id, class: "card", "aria-labelledby": id + "-title" }, head,
    about ? el("p", { class: "soft" }, about) : null, ...children);
  byId("sections").append(el("a", { href: "#" + id }, title));
  byId("main").append(box);
  return box;
}
function legend(items) {
  return el("ul", { class: "legend" }, items.map(([name, colours, kind]) => el("li", {},
    [colours].flat().map(colour => el("i", { class: kind, style: kind === "line" || kind === "dash" ? "border-color:" + colour
                                                                                                     : "background:" + colour })), name)));
}
// A table in a box of its own that scrolls where it is too wide. Rows of texts; `texts`: how many of the first columns are
// words; `long`: a column of sentences; `plan`: one of plans in words.
let tables = 0;
function table(caption, head, rows, { texts = 1, long = [], plan = -1, chosen = -1 } = {}) {
  const id = "table-" + tables++, kind = c => long.includes(c) || c === plan ? "text long" : c < texts ? "text" : null;
  return el("div", {}, el("p", { class: "caption", id }, caption), el("div", { class: "wide", role: "region", tabindex: 0, "aria-labelledby": id }, el("table", { "aria-labelledby": id },
    el("thead", {}, el("tr", {}, head.map((text, c) => el("th", { scope: "col", class: kind(c) }, text)))),
    el("tbody", {}, rows.map((row, r) => el("tr", { class: r === chosen ? "chosen" : null },
      row.map((cell, c) => el("td", { class: kind(c) }, c === plan ? planWords(cell) : cell))))))));
}
const asTable = (what, ...rest) => el("details", {}, el("summary", {}, what + " as a table"), table(...rest));
// The same, made when it is opened: of what may be long.
function lateTable(what, make) {
  const box = el("details", {}, el("summary", {}, what + " as a table"));
  box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(make()); });
  return box;
}
function facts(list) {
  return el("dl", { class: "facts" }, list.map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", { class: "soft" }, more) : null))));
}

// ---- the command that can be copied
function command(text) {
  const button = el("button", { type: "button" }, "Copy");
  // A line ends between words, but for those that no line holds.
  const code = el("code", {}, text.split(" ").flatMap((word, i) => [i ? " " : null, el("span", { class: word.length <= 24 ? "whole" : null }, word)]));
  button.addEventListener("click", async () => {
    let copied = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch (_) {  // a page that was opened as a file may not
      getSelection().selectAllChildren(code);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Press Ctrl+C";
    say(copied ? "Copied" : "The command is selected");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return el("div", { class: "command" }, code, button);
}

// ---- what is chosen on the page stands in its address
const state = Object.fromEntries(new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : ""));
// Another address in the same tab is another question; the links to sections have no "=".
addEventListener("hashchange", () => { if (location.hash.includes("=")) location.reload(); });
function keepState(key, value) {
  if (value === undefined || value === null || value === "") delete state[key];
  else state[key] = String(value);
  try {
    history.replaceState(null, "", "#" + new URLSearchParams(state));
  } catch (_) { }  // where a browser lets no file do so, the address stays as it is
}
function choice(label, options, chosen, changed) {
  const select = el("select", {}, options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)));
  select.addEventListener("change", () => changed(select.value));
  return el("label", {}, label, select);
}
