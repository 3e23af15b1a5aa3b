#include "draw/heat_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace echelon::heat_map_test {
namespace {

HeatMap map_of(std::vector<std::vector<double>> values) {
  return {"before", "as it is", "expert", std::move(values)};
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(HeatMapText, HasALetterForEachLoad) {
  EXPECT_EQ(
      heat_map_text({map_of({{0, 0.5, 1, 1.5, 2, 4}, {1, 1, 1, 1, 1, 1}})}, {80, false}),
      "before: as it is\n"
      "expert 0 | .-+#@|\n"
      "expert 1 |------|\n"
      "          step 0 to 5\n"
      "\n"
      "load / average:  '@' from 2.5  '#' from 1.75  '+' from 1.3  '-' around 1  '.' from 0.4  ' ' less\n");
}

// Rows by the largest, so that a hot one does not disappear, columns by the mean.
TEST(HeatMapText, FoldsWhatDoesNotFit) {
  std::vector<std::vector<double>> values(64, std::vector<double>(100, 0.5));
  std::fill(values[7].begin(), values[7].begin() + 50, 4.0);
  const std::string text = heat_map_text({map_of(values)}, {64, false});
  EXPECT_NE(text.find("  expert 6-7 |@@@@@@@@@@@@@@@@@......"), std::string::npos) << text;
  EXPECT_NE(text.find("expert 62-63 |........"), std::string::npos) << text;
  EXPECT_NE(text.find("step 0 to 99"), std::string::npos);
  EXPECT_EQ(count(text, "expert"), 32u);
  for (std::size_t at = 0, end = 0; (end = text.find('\n', at)) != std::string::npos; at = end + 1)
    if (text.compare(at, 4, "load") != 0) {  // the legend
      EXPECT_LE(end - at, 64u);
    }
}

TEST(HeatMapText, HasColoursOnATerminalThatHas) {
  const std::string text = heat_map_text({map_of({{0.1, 1, 4}})}, {80, true});
  EXPECT_NE(text.find("\x1b[48;5;24m"), std::string::npos);  // blue
  EXPECT_NE(text.find("\x1b[48;5;88m"), std::string::npos);  // brown
  EXPECT_EQ(count(text, "\x1b[0m"), count(text, "\x1b[48"));
}

TEST(HeatMapSvg, ColoursByTheLogarithmAndEscapes) {
  HeatMap odd = map_of({{0, 0.25, 1, 1, 4, 100}});
  odd.title = "a<b & c";
  const std::string svg = heat_map_svg({odd, map_of({{1, 1, 1, 1, 1, 1}, {2, 2, 2, 2, 2, 2}})});
  EXPECT_TRUE(svg.starts_with("<svg ")) << svg.substr(0, 80);
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_NE(svg.find("a&lt;b &amp; c"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  // Three colours in the first map, two in the second; each a path, which begins where its cells do.
  EXPECT_EQ(count(svg, "<path fill="), 5u);
  EXPECT_EQ(count(svg, "<path fill=\"#0b4f8a\""), 1u);
  EXPECT_EQ(count(svg, "<path fill=\"#f7f7f2\""), 2u);
  EXPECT_EQ(count(svg, "<path fill=\"#f2a24a\""), 1u);
  EXPECT_EQ(count(svg, "<path fill=\"#8c2d04\""), 1u);
  EXPECT_EQ(svg, heat_map_svg({odd, map_of({{1, 1, 1, 1, 1, 1}, {2, 2, 2, 2, 2, 2}})}));
}

TEST(HeatMapSvg, StaysSmall) {
  const std::vector<std::vector<double>> values(256, std::vector<double>(1000, 1.0));
  EXPECT_LT(heat_map_svg({map_of(values)}).size(), 30000u);
  EXPECT_FALSE(heat_map_svg({}).empty());
}

}  // namespace
}  // namespace echelon::heat_map_test
