// The drawings of small schedules, letter by letter where they are text, well-formed where they are files.
#include "draw/gantt.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>

#include "base/utf8.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/text.h"

namespace echelon::gantt_test {
namespace {

Track track(const Schedule& schedule, double message = 0) {
  SimulationCosts costs;
  const double part = schedule.stage_fraction();
  costs.stages = {{part, part, part}};
  costs.message = message;
  return {schedule.name, "note", simulate(schedule, costs).timeline};
}

TEST(GanttText, IsTheTextbooks) {
  EXPECT_EQ(gantt_text({track(one_f_one_b(2, 3))}, {80, false}),
            "1f1b: note\n"
            "        0              5              10\n"
            "rank 0  F0 F1 .  .  BW0-- F2 BW1-- .  BW2--\n"
            "rank 1  .  F0 BW0-- F1 BW1-- F2 BW2-- .  .\n"
            "\n"
            "F forward   BW backward, both gradients   . idle\n");
}

TEST(GanttText, TellsSplitBackwardAndChunks) {
  EXPECT_EQ(gantt_text({track(zb_v(2, 2))}, {80, false}),
            "zb-v: note\n"
            "        0           2           4           6\n"
            "rank 0  F0 F1 .  f0 b0 w0 f1 b1 w1 B0 W0 .  B1 W1\n"
            "rank 1  .  F0 f0 F1 f1 b0 w0 B0 W0 b1 w1 B1 W1 .\n"
            "\n"
            "F forward   B gradient of the input   W gradient of the weights   . idle\n"
            "small letters: every other chunk\n");
}

// A pass of both gradients is not taken for one of the input's, however short it is.
TEST(GanttText, NamesAreWhole) {
  const Track both{"", "", {{{{{Op::B, 0, 0}, 0, 1}, {{Op::BW, 0, 1}, 1, 2}, {{Op::W, 0, 0}, 2, 3}}}}};
  EXPECT_NE(gantt_text({both}, {80, false}).find("rank 0  B0  BW1 W0\n"), std::string::npos)
      << gantt_text({both}, {80, false});
  const Track part{"", "", {{{{{Op::V, 0, 10}, 0, 1}, {{Op::VW, 0, 10}, 1, 2}}}}};
  EXPECT_NE(gantt_text({part}, {80, false}).find("rank 0  V10  VW10\n"), std::string::npos)
      << gantt_text({part}, {80, false});
}

TEST(GanttText, FoldsToTheWidth) {
  const std::string text = gantt_text({track(gpipe(2, 4))}, {30, false});
  EXPECT_EQ(text,
            "gpipe: note\n"
            "        0              5\n"
            "rank 0  F0 F1 F2 F3 .  .  .\n"
            "rank 1  .  F0 F1 F2 F3 BW0--\n"
            "\n"
            "                 10\n"
            "rank 0  BW0-- BW1-- BW2-- BW3\n"
            "rank 1  BW1-- BW2-- BW3-- .\n"
            "\n"
            "\n"
            "rank 0  --\n"
            "rank 1  .\n"
            "\n"
            "F forward\n"
            "BW backward, both gradients\n"
            ". idle\n");
}

TEST(GanttText, LegendsFitTheWidthAsDrawingsDo) {
  for (const bool is_colour : {false, true}) {
    std::istringstream lines(std::regex_replace(gantt_text({track(zb_v(4, 4))}, {80, is_colour}),
                                                std::regex("\x1b\\[[0-9;]*m"), ""));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST(GanttText, SqueezesWhatWouldFoldTooOften) {
  const std::string text = gantt_text({track(one_f_one_b(8, 64))}, {60, false});
  EXPECT_NE(text.find("\nrank 7  ..BBBB"), std::string::npos) << text;
  EXPECT_NE(text.find("one column is 4.096 units of time"), std::string::npos) << text;
  std::size_t longest = 0, begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    if (text.compare(begin, 5, "rank ") == 0) longest = std::max(longest, end - begin);
  EXPECT_EQ(longest, 60u);
}

// Of a pair each part has half of its time, in however few columns; and a letter is told once.
TEST(GanttText, SqueezedPairsShowBothParts) {
  const std::string text = gantt_text({track(dualpipe(8, 64))}, {70, false});
  for (std::size_t at = 0; (at = text.find("\nrank ", at)) != std::string::npos; ++at) {
    const std::string row = text.substr(at + 1, text.find('\n', at + 1) - at - 1);
    const auto count = [&](const std::string& letters) {
      return std::count_if(row.begin() + 6, row.end(),
                           [&](char c) { return letters.find(c) != std::string::npos; });
    };
    EXPECT_GE(count("Bb"), 25) << text;
    EXPECT_GE(count("Ff"), 25) << text;
    EXPECT_EQ(row.find("FfFfFf"), std::string::npos) << text;
  }
  EXPECT_NE(text.find("B gradient of the input, or backward, both gradients"), std::string::npos) << text;
  EXPECT_EQ(text.find("   B backward"), std::string::npos) << text;
  // Two fifths of the first column's time are a pair's, which is no half of it.
  Track idle{
      "", "", {{{{{Op::F, 0, 0, 0, true}, 0, 40}, {{Op::BW, 0, 1}, 0, 40}, {{Op::F, 0, 2}, 3199, 3200}}}}};
  EXPECT_NE(gantt_text({idle}, {40, false}).find("rank 0  ."), std::string::npos)
      << gantt_text({idle}, {40, false});
}

TEST(GanttText, DrawsAPairThatTookTurnsWhereItsPartsWere) {
  Track track{
      "measured", "", {{{{{Op::F, 0, 0}, 0, 1}, {{Op::F, 0, 1, 0, true}, 1, 2}, {{Op::BW, 0, 0}, 3, 5}}}}};
  EXPECT_NE(gantt_text({track}, {80, false}).find("rank 0  F0 F1 .  BW0--\n"), std::string::npos)
      << gantt_text({track}, {80, false});
}

TEST(GanttText, DrawsPairsAndColours) {
  const Track pair = track(from_text("0F0 (0F1;0BW0) 0BW1\n", "pair"));
  EXPECT_NE(gantt_text({pair}, {80, false}).find("rank 0  F0 F1-&BW0- BW1--\n"), std::string::npos)
      << gantt_text({pair}, {80, false});
  const std::string colour = gantt_text({track(naive(1, 1))}, {80, true});
  EXPECT_NE(colour.find("rank 0  \x1b[38;5;231;48;5;25m0"), std::string::npos) << colour;
  EXPECT_EQ(std::regex_replace(colour, std::regex("\x1b\\[[0-9;]*m"), "").find('\x1b'), std::string::npos);
}

TEST(GanttText, DrawsMeasuredTimes) {
  Timeline measured;
  measured.ranks = {{{{Op::F, 0, 0}, 100.0131, 101.0007}, {{Op::BW, 0, 0}, 101.3, 103.1}}, {}};
  const std::string text = gantt_text({{"measured", "", measured}}, {40, false});
  EXPECT_NE(text.find("FFFFF"), std::string::npos) << text;
  EXPECT_NE(text.find("BBBBB"), std::string::npos) << text;
  gantt_text({{"empty", "", Timeline{}}}, {40, false});
  gantt_text({}, {40, false});
}

// Every tag is closed in order, and there is no bare & or <.
void expect_well_formed(const std::string& xml) {
  std::vector<std::string> open;
  const std::regex tag("<(/?)([a-zA-Z]+)((?:\\s+[a-zA-Z:-]+=\"[^\"<]*\")*)\\s*(/?)>");
  std::size_t at = 0;
  while ((at = xml.find('<', at)) != std::string::npos) {
    std::smatch match;
    const std::size_t end = xml.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string one = xml.substr(at, end + 1 - at);
    ASSERT_TRUE(std::regex_match(one, match, tag)) << one.substr(0, 200);
    if (match[1] == "/") {
      ASSERT_FALSE(open.empty());
      ASSERT_EQ(open.back(), match[2].str());
      open.pop_back();
    } else if (match[4] != "/") {
      open.push_back(match[2]);
    }
    at = end;
  }
  EXPECT_TRUE(open.empty());
  EXPECT_FALSE(std::regex_search(xml, std::regex("&(?!amp;|lt;|gt;|quot;)")));
}

TEST(GanttSvg, IsWellFormed) {
  Track odd = track(dualpipe(4, 8));
  odd.title = "a <b> & \"c\"";
  const std::string svg = gantt_svg({odd, track(zb_v(4, 8)), track(interleaved(2, 4, 4))});
  expect_well_formed(svg);
  EXPECT_NE(svg.find("a &lt;b&gt; &amp; &quot;c&quot;"), std::string::npos);
  EXPECT_NE(svg.find("gradient of the weights"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  expect_well_formed(gantt_svg({{"empty", "", Timeline{}}}));
  EXPECT_LT(gantt_svg({track(one_f_one_b(64, 256))}).size(), 2u << 20);
}

TEST(GanttSvg, HasNoCharactersThatXmlLacks) {
  Track named = track(gpipe(1, 1));
  named.title = "a\x01\xef\xbf\xbe\xef\xbf\xbf";
  const std::string svg = gantt_svg({named});
  for (const char* absent : {"\x01", "\xef\xbf\xbe", "\xef\xbf\xbf"})
    EXPECT_EQ(svg.find(absent), std::string::npos);
}

TEST(GanttSvg, LabelsTheEndOnce) {
  const std::string svg = gantt_svg({track(one_f_one_b(1, 1))});
  const std::regex label(">3</text>");
  EXPECT_EQ(std::distance(std::sregex_iterator(svg.begin(), svg.end(), label), {}), 1) << svg;
}

// As the name of a schedule's file may be.
TEST(Perfetto, WhatIsNotUtf8IsReplaced) {
  Track named = track(gpipe(2, 2));
  named.title = "x\xff<&\".txt";
  named.note = "\xc3";
  const std::string svg = gantt_svg({named}), json = perfetto_json({named}, 1000);
  for (const std::string& text : {svg, json}) {
    EXPECT_TRUE(is_utf8(text));
    EXPECT_NE(text.find("x\xef\xbf\xbd"), std::string::npos) << text.substr(0, 300);
  }
  expect_well_formed(svg);
  EXPECT_TRUE(nlohmann::json::accept(json));
}

TEST(Perfetto, HoldsEveryInstruction) {
  const auto trace = nlohmann::json::parse(perfetto_json({track(zb_h1(3, 5)), track(gpipe(3, 5))}, 1000));
  int bars = 0;
  double last = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    ++bars;
    EXPECT_GE(event["dur"].get<double>(), 1000);
    EXPECT_TRUE(event["args"].contains("microbatch"));
    last = std::max(last, event["ts"].get<double>() + event["dur"].get<double>());
  }
  EXPECT_EQ(bars, 3 * 15 + 3 * 10);
  EXPECT_EQ(last, 21000);
}

}  // namespace
}  // namespace echelon::gantt_test
