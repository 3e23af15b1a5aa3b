// What is wrong with a page as a browser shows it: page_browser_test.cpp and page_planner_browser_test.js put this into theirs.
const wrong = [];
addEventListener("error", event => wrong.push(event.message));
// Uses the page's controls, and says what is wrong: of a page that is drawn, whose width is the window's.
function probe() {
  const visible = e => e.getClientRects().length > 0;
  const name = e => (e.id || e.className.baseVal || e.className || e.tagName) + " " + (e.textContent || "").slice(0, 30);
  for (const select of document.querySelectorAll("select:not(form select)")) {  // what a form asks takes an answer
    for (let i = select.options.length - 1; i >= 0; --i) { select.selectedIndex = i; select.dispatchEvent(new Event("change")); }
  }
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const button of document.querySelectorAll("button:not(form button)")) if (button.textContent !== "Copy") button.click();
  const key = (e, k) => e.dispatchEvent(new KeyboardEvent("keydown", { key: k, bubbles: true }));
  for (const e of document.querySelectorAll("canvas, svg.chart[tabindex]"))
    for (const k of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "Enter", "+", "-", "0", "Escape"]) key(e, k);
  for (const e of document.querySelectorAll("canvas, svg.chart, .track span"))
    e.dispatchEvent(new PointerEvent("pointermove", { clientX: e.getBoundingClientRect().left + e.clientWidth / 2, clientY: e.getBoundingClientRect().top + 8, bubbles: true }));
  return new Promise(resolve => setTimeout(resolve, 300)).then(() => {
    const root = document.documentElement;
    if (root.scrollWidth > innerWidth) wrong.push("wider than the window: " + root.scrollWidth);
    for (const e of document.querySelectorAll("main *, header *, #controls *"))
      if (visible(e) && !e.closest(".wide, svg, .unseen") && e.getBoundingClientRect().right > innerWidth + 0.5) wrong.push("cut: " + name(e));
    for (const text of document.querySelectorAll("svg.chart text")) {
      const box = text.getBoundingClientRect();
      if (visible(text) && (box.left < -0.5 || box.right > innerWidth + 0.5)) wrong.push("a cut label: " + text.textContent);
    }
    for (const drawn of document.querySelectorAll("svg.chart"))
      if (drawn.textContent.includes(", logarithmic") && drawn.querySelectorAll(".grid").length < 3) wrong.push("a logarithmic axis without marks: " + name(drawn));
    const framed = document.querySelector(".heat button.chosen");
    if (framed && framed.textContent !== seconds(data.answer.plans[0].step_seconds)) wrong.push("the framed size shows another plan than the chosen one: " + framed.textContent);
    for (const e of document.querySelectorAll("[aria-labelledby]")) if (!document.getElementById(e.getAttribute("aria-labelledby"))) wrong.push("no label: " + name(e));
    for (const e of document.querySelectorAll("button, select, input, canvas:not([aria-hidden]), svg[role], [role=region]"))
      if (!(e.textContent.trim() && e.tagName === "BUTTON") && !e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby") && !e.closest("label")) wrong.push("no name: " + name(e));
    // By what the browser makes of it for those who have the page read out.
    const focusable = [...document.querySelectorAll("a[href], button, select, input, summary, [tabindex='0'], canvas[tabindex]")].filter(e => visible(e) && !e.disabled);
    for (const e of focusable) {
      if (!e.computedName) wrong.push("no name: " + name(e));
      if (["generic", "none"].includes(e.computedRole) && !e.matches("code, pre")) wrong.push("no role: " + name(e));
      if (e.tabIndex !== 0) wrong.push("not in the order of tabs: " + name(e));
      e.focus({ preventScroll: true });
      if (document.activeElement !== e) wrong.push("takes no focus: " + name(e));
      const style = getComputedStyle(e);
      if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2) wrong.push("its focus is not seen: " + name(e));
      const box = e.getBoundingClientRect();
      if (e.matches("button, select, input, summary") && (box.height < 23.5 || box.width < 23.5)) wrong.push("too small to hit: " + name(e));
    }
    document.activeElement.blur();
    if (document.querySelectorAll("main").length !== 1 || document.querySelectorAll("body > header").length !== 1 || document.querySelectorAll("h1").length !== 1) wrong.push("not one main, header and h1");
    for (const e of document.querySelectorAll("nav, section, form")) if (!e.computedName) wrong.push("a landmark without a name: " + name(e));
    if (!document.documentElement.lang || !document.title) wrong.push("no language or title");
    let level = 0;
    for (const e of document.querySelectorAll("h1, h2, h3, h4")) {
      if (+e.tagName[1] > level + 1) wrong.push("a heading too deep: " + name(e));
      level = +e.tagName[1];
    }
    for (const e of document.querySelectorAll("thead th")) if (e.scope !== "col") wrong.push("a column's head without a scope: " + name(e));
    // WCAG 2.1: relative luminance; 4.5 to 1, for large text 3 to 1.
    const rgba = text => { const n = text.match(/[\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
    const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]).concat(1);
    const ground = e => {
      if (!e) return [255, 255, 255, 1];
      const own = rgba(getComputedStyle(e).backgroundColor);
      return own[3] === 1 ? own : over(own, ground(e.parentElement));
    };
    const light = c => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => { const v = c[i] / 255; return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); }, 0);
    const texts = [];  // where each text stands, for what is on top of another
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
      const e = node.parentElement;
      if (!node.data.trim() || e.closest("script, style, noscript, option, .unseen, #tip, :disabled") || !visible(e)) continue;
      const style = getComputedStyle(e), inside = e.namespaceURI.endsWith("svg"), below = ground(e.closest("svg") ? e.closest("svg").parentElement : e);
      const a = light(over(rgba(inside ? style.fill : style.color), below)), b = light(below), large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && +style.fontWeight >= 700);
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < (large ? 3 : 4.5)) wrong.push("contrast " + contrast.toFixed(2) + ": " + name(e));
      const range = document.createRange();
      range.selectNodeContents(node);
      if (!inside && e.closest("table, h1, h2, h3, dl, button, label, nav, code"))
        for (const word of node.data.matchAll(/\w{3,24}/g)) {
          const part = document.createRange();
          part.setStart(node, word.index);
          part.setEnd(node, word.index + word[0].length);
          const boxes = [...part.getClientRects()];
          if (boxes.some(box => Math.abs(box.top - boxes[0].top) > 5)) wrong.push("broken in mid-word: " + word[0] + " of " + name(e));
        }
      for (const box of range.getClientRects()) if (box.width > 1) texts.push({ box, e, text: node.data.trim().slice(0, 30), scroll: e.closest(".wide, pre") });
    }
    texts.sort((a, b) => a.box.top - b.box.top);
    for (let i = 0; i < texts.length; ++i)
      for (let k = i + 1; k < texts.length && texts[k].box.top < texts[i].box.bottom - 3; ++k) {
        const a = texts[i], b = texts[k];
        if (a.e !== b.e && a.scroll === b.scroll && Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left) > 2)
          wrong.push("on top of another: " + a.text + " and " + b.text);
      }
    const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
    if (new Set(ids).size !== ids.length) wrong.push("an id stands twice");
    for (const a of document.querySelectorAll("a[href^='#']")) if (!document.getElementById(a.hash.slice(1))) wrong.push("leads nowhere: " + a.hash);
    for (const bad of ["NaN", "undefined", "Infinity", "[object"]) if (document.body.innerText.includes(bad)) wrong.push("says " + bad);
    const shown = [...document.querySelectorAll("main section")].map(e => e.id).join(" ");
    const tell = () => innerWidth + " sections " + shown + "; wrong: " + [...new Set(wrong)].slice(0, 8).join(" | ") + ";";
    if (typeof axe === "undefined") return tell();
    return axe.run(document, { resultTypes: ["violations"], iframes: false }).then(result => {
      for (const one of result.violations) wrong.push("axe, " + one.impact + ": " + one.id + ": " + one.nodes[0].html.replace(/[<>]/g, " ").slice(0, 90));
      return tell();
    }, error => { wrong.push("axe: " + error); return tell(); });
  });
}
