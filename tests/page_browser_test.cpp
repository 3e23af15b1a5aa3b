// Every page as a browser shows it, from a phone to a wide screen, light and dark. Skipped where there is no
// Chromium.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "run_command.h"

namespace echelon::page_browser_test {
namespace {

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
  void expect_sound(std::string page, const std::vector<std::string>& sections) const {
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
    const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
    if (new Set(ids).size !== ids.length) wrong.push("an id stands twice");
    for (const a of document.querySelectorAll("a[href^='#']")) if (!document.getElementById(a.hash.slice(1))) wrong.push("leads nowhere: " + a.hash);
    for (const bad of ["NaN", "undefined", "Infinity", "[object"]) if (document.body.innerText.includes(bad)) wrong.push("says " + bad);
    const shown = [...document.querySelectorAll("main section")].map(e => e.id).join(" ");
    parent.postMessage(innerWidth + " sections " + shown + "; wrong: " + [...new Set(wrong)].slice(0, 8).join(" | ") + ";", "*");
  }, 300);
});
</script>
)";
    const std::size_t head = page.find("<style>");
    ASSERT_NE(head, std::string::npos);
    page.insert(head, probe);
    write_text(directory_ / "probed.html", page);
    // Frames, as a window of this browser is never as narrow as a phone.
    const std::vector<int> widths{360, 800, 1440, 2560};
    std::string frames = "<!doctype html><title>none</title><script>const said = []; addEventListener('message', event => { "
                         "said.push(event.data); document.title = said.join(' END '); });</script>";
    for (const int width : widths)
      frames += fmt::format("<iframe src='probed.html' style='width:{}px;height:900px;border:0'></iframe>", width);
    write_text(directory_ / "frames.html", frames);
    for (const bool dark : {false, true}) {
      const CommandResult r = run_command(fmt::format(
          "timeout 200 {} --headless --no-sandbox --disable-gpu --user-data-dir='{}/profile' "
          "--blink-settings=preferredColorScheme={} --virtual-time-budget=8000 --window-size=2600,900 "
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

 private:
  std::string browser_;
  const TemporaryDirectory directory_;
};

TEST_F(PageBrowser, Plan) {
  expect_sound(made("plan --model llama-3-70b --machine h100 --gpus 64 --global-batch 256 --seq-len 8192 --pp 8 "
                    "--html page.html",
                    "page.html"),
               {"chosen", "plans", "sizes", "front", "time", "rank-memory", "schedules", "memory", "mesh", "words"});
  expect_sound(made("plan --model mixtral-8x7b --machine h100 --gpus 16 --global-batch 64 --seq-len 4096 --html "
                    "page.html",
                    "page.html"),
               {"chosen", "plans", "sizes", "mesh"});
}

TEST_F(PageBrowser, Schedules) {
  expect_sound(made("simulate --compare gpipe,1f1b,interleaved,zb-h1,zb-v,dualpipe,pipedream,dualpipev --pp 4 "
                    "--microbatches 8 --format html --out page.html",
                    "page.html"),
               {"numbers", "schedules", "memory", "front"});
  expect_sound(made("simulate --schedule 1f1b --pp 32 --microbatches 64 --format html --out page.html", "page.html"),
               {"numbers", "schedules", "memory"});
}

TEST_F(PageBrowser, Run) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += fmt::format("{} bottles of {} on the wall\n", i, i * i);
  write_text(directory() + "/text", text);
  const std::string train =
      "train --model mixtral-tiny --data text --seq-len 32 --global-batch 8 --micro-batch 2 --dp 2 --pp 2 --threads 1 "
      "--steps 12 --eval-every 4 --straggler-every 3 --sample 0 --checkpoint ck --save-every 5 --log log.jsonl "
      "--report page.html --timeline line.html";
  expect_sound(made(train, "page.html"), {"overview", "loss", "norm", "rate", "speed", "mfu", "memory-twins", "experts",
                                          "stragglers", "events", "schedules", "ranks"});
  expect_sound(read_bytes(directory() + "/line.html"), {"schedules", "ranks", "spent"});
  expect_sound(made("view log.jsonl --out view.html", "view.html"), {"overview", "loss", "time-twins", "events"});
}

}  // namespace
}  // namespace echelon::page_browser_test
