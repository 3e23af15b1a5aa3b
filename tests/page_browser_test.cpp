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
    const std::string probe = "<script>" + read_bytes(ECHELON_SOURCE_DIR "/tests/page_probe.js") +
                              "addEventListener('load', () => probe().then(said => parent.postMessage(said, '*')));</script>\n";
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
