// Every page as a browser shows it, from a phone to a wide screen, light and dark: nothing wrong, cut or on top of
// another; and as those meet it who use a keyboard or have it read out: names, contrasts, landmarks, headings, focus.
// Pictures of all stay in `screenshots` of the build directory. Skipped where there is no Chromium.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include "bottles.h"
#include "run_command.h"

namespace echelon::page_browser_test {
namespace {

namespace fs = std::filesystem;
using namespace checks;

class PageBrowser : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (browser_.empty() && run_command(fmt::format("command -v {}", name)).status == 0) browser_ = name;
    if (browser_.empty()) GTEST_SKIP() << "there is no chromium here";
  }

  std::string made(const std::string& arguments, const std::string& name) const {
    const CommandResult r =
        run_command(fmt::format("cd '{}' && '{}' {}", directory(), ECHELON_BINARY, arguments));
    EXPECT_EQ(r.status, 0) << r.output;
    return read_bytes(directory_ / name);
  }
  std::string directory() const { return directory_.path().string(); }

  // Loads a page, uses its controls, and asks it what is wrong.
  void expect_sound(const std::string& name, std::string page, const std::vector<std::string>& sections) const {
    take_pictures(name, page);
    const std::string probe = R"(<script>
const wrong = [];
addEventListener("error", event => wrong.push(event.message));
addEventListener("load", () => {
  const visible = e => e.getClientRects().length > 0;
  const name = e => (e.id || e.className.baseVal || e.className || e.tagName) + " " + (e.textContent || "").slice(0, 30);
  for (const select of document.querySelectorAll("select")) {
    for (let i = select.options.length - 1; i >= 0; --i) { select.selectedIndex = i; select.dispatchEvent(new Event("change")); }
  }
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const button of document.querySelectorAll("button")) if (button.textContent !== "Copy") button.click();
  const key = (e, k) => e.dispatchEvent(new KeyboardEvent("keydown", { key: k, bubbles: true }));
  for (const e of document.querySelectorAll("canvas, svg.chart[tabindex]"))
    for (const k of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "Enter", "+", "-", "0", "Escape"]) key(e, k);
  for (const e of document.querySelectorAll("canvas, svg.chart, .track span"))
    e.dispatchEvent(new PointerEvent("pointermove", { clientX: e.getBoundingClientRect().left + e.clientWidth / 2, clientY: e.getBoundingClientRect().top + 8, bubbles: true }));
  setTimeout(() => {
    const root = document.documentElement;
    if (root.scrollWidth > innerWidth) wrong.push("wider than the window: " + root.scrollWidth);
    for (const e of document.querySelectorAll("main *, header *"))
      if (visible(e) && !e.closest(".wide, svg, .unseen") && e.getBoundingClientRect().right > innerWidth + 0.5) wrong.push("cut: " + name(e));
    for (const text of document.querySelectorAll("svg.chart text")) {
      const box = text.getBoundingClientRect();
      if (visible(text) && (box.left < -0.5 || box.right > innerWidth + 0.5)) wrong.push("a cut label: " + text.textContent);
    }
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
    const tell = () => parent.postMessage(innerWidth + " sections " + shown + "; wrong: " + [...new Set(wrong)].slice(0, 8).join(" | ") + ";", "*");
    if (typeof axe === "undefined") return tell();
    axe.run(document, { resultTypes: ["violations"], iframes: false }).then(result => {
      for (const one of result.violations) wrong.push("axe, " + one.impact + ": " + one.id + ": " + one.nodes[0].html.replace(/[<>]/g, " ").slice(0, 90));
      tell();
    }, error => { wrong.push("axe: " + error); tell(); });
  }, 300);
});
</script>
)";
    const std::size_t head = page.find("<style>");
    ASSERT_NE(head, std::string::npos);
    page.insert(head, axe().empty() ? probe : "<script>" + axe() + "</script>" + probe);
    write_text(directory_ / "probed.html", page);
    // Frames, as a window of this browser is never as narrow as a phone.
    std::string frames = "<!doctype html><title>none</title><script>const said = []; addEventListener('message', event => { "
                         "said.push(event.data); document.title = said.join(' END '); });</script>";
    for (const int width : widths)
      frames += fmt::format("<iframe src='probed.html' style='width:{}px;height:900px;border:0'></iframe>", width);
    write_text(directory_ / "frames.html", frames);
    for (const bool dark : {false, true}) {
      const CommandResult r = run_command(fmt::format(
          "timeout 200 {} --headless --no-sandbox --disable-gpu --enable-blink-features=ComputedAccessibilityInfo "
          "--user-data-dir='{}/profile' --blink-settings=preferredColorScheme={} --virtual-time-budget=8000 --window-size=2600,900 "
          "--dump-dom 'file://{}/frames.html' 2>/dev/null",
          browser_, directory(), dark ? 0 : 1, directory()));
      ASSERT_EQ(r.status, 0) << r.output.substr(0, 2000);
      const std::size_t at = r.output.find("<title>");
      ASSERT_NE(at, std::string::npos) << r.output.substr(0, 2000);
      const std::string title = r.output.substr(at + 7, r.output.find("</title>", at) - at - 7) + " END ";
      for (const int width : widths) {
        const std::string begin = fmt::format("{} sections ", width);
        const std::size_t said = title.find(begin);
        ASSERT_NE(said, std::string::npos) << "nothing was said at " << width << ": " << title;
        const std::string one = title.substr(said, title.find(" END ", said) - said);
        EXPECT_TRUE(one.ends_with("wrong: ;")) << (dark ? "dark: " : "light: ") << one;
        for (const std::string& section : sections)
          EXPECT_NE(one.find(" " + section), std::string::npos) << section << " in " << one;
      }
    }
  }

 protected:
  // The rules of axe-core, which Debian does not have: a package of PyPI brings them. Empty where it cannot be had.
  static const std::string& axe() {
    static const std::string source = [] {
      const fs::path place = fs::path(ECHELON_BINARY).parent_path() / "axe";
      const fs::path file = place / "axe_playwright_python/axe.min.js";
      if (!fs::exists(file))
        run_command(fmt::format("python3 -m venv '{0}/venv' && '{0}/venv/bin/pip' download -q --no-deps -d '{0}' "
                                "axe-playwright-python==0.1.8 && python3 -m zipfile -e '{0}'/*.whl '{0}'",
                                place.string()));
      return fs::exists(file) ? read_bytes(file) : "";
    }();
    return source;
  }

 private:
  // As it is opened, at all widths beside one another.
  void take_pictures(const std::string& name, const std::string& page) const {
    const fs::path pictures = fs::path(ECHELON_BINARY).parent_path() / "screenshots";
    fs::create_directories(pictures);
    write_text(directory_ / "page.html", page);
    std::string frames = "<!doctype html><body style='margin:0;display:flex;align-items:start;background:#888'>";
    int wide = 0;
    for (const int width : widths) {
      frames += fmt::format("<iframe src='page.html' style='flex:none;width:{}px;height:{}px;border:0;margin-right:8px'></iframe>",
                            width, picture_height);
      wide += width + 8;
    }
    write_text(directory_ / "pictures.html", frames);
    for (const bool dark : {false, true}) {
      const std::string picture = (pictures / fmt::format("{}-{}.png", name, dark ? "dark" : "light")).string();
      fs::remove(picture);
      const CommandResult r = run_command(fmt::format(
          "timeout 200 {} --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir='{}/profile' "
          "--blink-settings=preferredColorScheme={} --virtual-time-budget=8000 --window-size={},{} "
          "--screenshot='{}' 'file://{}/pictures.html'",
          browser_, directory(), dark ? 0 : 1, wide, picture_height, picture, directory()));
      EXPECT_EQ(r.status, 0) << r.output;
      EXPECT_TRUE(fs::exists(picture)) << r.output;
    }
  }

  static constexpr std::array<int, 4> widths{360, 800, 1440, 2560};
  static constexpr int picture_height = 6000;
  std::string browser_;
  const TemporaryDirectory directory_;
};

TEST_F(PageBrowser, IsToldByAxeToo) {
  if (axe().empty()) GTEST_SKIP() << "axe-playwright-python cannot be had from PyPI: its rules are not applied";
  EXPECT_NE(axe().find("axe v4"), std::string::npos);
  EXPECT_EQ(axe().find("</script"), std::string::npos);
}

TEST_F(PageBrowser, Plan) {
  expect_sound("plan", made("plan --model llama-3-70b --machine h100 --gpus 64 --global-batch 256 --seq-len 8192 --pp 8 "
                    "--html page.html",
                    "page.html"),
               {"chosen", "plans", "left-out", "sizes", "front", "time", "rank-memory", "schedules", "memory", "mesh", "words"});
  expect_sound("plan-of-experts", made("plan --model mixtral-8x7b --machine h100 --gpus 16 --global-batch 64 --seq-len 4096 --html "
                    "page.html",
                    "page.html"),
               {"chosen", "plans", "sizes", "mesh"});
}

TEST_F(PageBrowser, PlanOfNothing) {
  const CommandResult r = run_command(fmt::format(
      "cd '{}' && '{}' plan --model llama-3-70b --gpus 2 --global-batch 16 --html page.html", directory(), ECHELON_BINARY));
  EXPECT_EQ(r.status, 1) << r.output;
  expect_sound("plan-of-nothing", read_bytes(directory() + "/page.html"), {"chosen", "left-out", "sizes", "words"});
}

TEST_F(PageBrowser, Schedules) {
  expect_sound("schedules", made("simulate --compare gpipe,1f1b,interleaved,zb-h1,zb-v,dualpipe,pipedream,dualpipev --pp 4 "
                    "--microbatches 8 --format html --out page.html",
                    "page.html"),
               {"numbers", "schedules", "memory", "front"});
  expect_sound("schedule", made("simulate --schedule 1f1b --pp 32 --microbatches 64 --format html --out page.html", "page.html"),
               {"numbers", "schedules", "memory"});
}

TEST_F(PageBrowser, Run) {
  write_text(directory() + "/text", bottles(400));
  const std::string train =
      "train --model mixtral-tiny --data text --seq-len 32 --global-batch 8 --micro-batch 2 --dp 2 --pp 2 --threads 1 "
      "--steps 12 --eval-every 4 --straggler-every 3 --sample 0 --checkpoint ck --save-every 5 --log log.jsonl "
      "--report page.html --timeline line.html";
  expect_sound("run", made(train, "page.html"), {"overview", "loss", "norm", "rate", "speed", "mfu", "memory-twins", "experts",
                                          "stragglers", "events", "schedules", "ranks"});
  expect_sound("timeline", read_bytes(directory() + "/line.html"), {"schedules", "ranks", "spent"});
  expect_sound("view", made("view log.jsonl --out view.html", "view.html"), {"overview", "loss", "time-twins", "events"});
}

}  // namespace
}  // namespace echelon::page_browser_test
