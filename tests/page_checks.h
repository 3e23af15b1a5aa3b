// What is true of every page that is drawn for a browser.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>

#include "draw/page.h"

namespace echelon::checks {

inline std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

// The document inside a page, which is whole: nothing in it is markup, every id that is named is there, and
// nothing is loaded from anywhere, but that a served one asks its server.
inline nlohmann::json document_of(const std::string& page, PageUse use = PageUse::file) {
  const std::string mark = "<script type=\"application/json\" id=\"data\">";
  const std::size_t begin = page.find(mark) + mark.size(), end = page.find("</script>", begin);
  EXPECT_NE(page.find(mark), std::string::npos);
  EXPECT_TRUE(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
  EXPECT_EQ(count_of(page, "<script"), 2u);
  EXPECT_EQ(count_of(page, "</script>"), 2u);
  const std::string data = page.substr(begin, end - begin);
  EXPECT_EQ(data.find('<'), std::string::npos);
  const std::string shell = page.substr(0, begin) + page.substr(end);
  for (const char* elsewhere : {"http:", "https:", "src=", "@import", "url(", "import("})
    EXPECT_EQ(shell.find(elsewhere), std::string::npos) << elsewhere;
  EXPECT_EQ(count_of(shell, "fetch("), use == PageUse::served ? 2u : 0u);
  for (const char* unfilled : {"{{title}}", "{{data}}", "/*{{style}}*/", "/*{{script}}*/"})
    EXPECT_EQ(shell.find(unfilled), std::string::npos) << unfilled;
  std::set<std::string> ids;
  const auto each = [&](const char* pattern, const auto& visit) {
    const std::regex form(pattern);
    for (std::sregex_iterator at(shell.begin(), shell.end(), form), none; at != none; ++at) visit((*at)[1].str());
  };
  each("\\bid=\"([^\"]+)\"", [&](const std::string& id) { EXPECT_TRUE(ids.insert(id).second) << id; });
  EXPECT_GE(ids.size(), 6u);
  each("byId\\(\"([^\"]+)\"\\)", [&](const std::string& id) { EXPECT_TRUE(ids.contains(id)) << id; });
  each("href=\"#([^\"]+)\"", [&](const std::string& id) { EXPECT_TRUE(ids.contains(id)) << id; });
  std::set<std::string> colours;  // every one that is used is declared
  each("(--[a-z-]+):", [&](const std::string& name) { colours.insert(name); });
  each("var\\((--[a-z-]+)\\)", [&](const std::string& name) { EXPECT_TRUE(colours.contains(name)) << name; });
  each("css\\(\"(--[a-z-]+)\"\\)", [&](const std::string& name) { EXPECT_TRUE(colours.contains(name)) << name; });
  const nlohmann::json document = nlohmann::json::parse(data, nullptr, false);
  EXPECT_FALSE(document.is_discarded());
  return document;
}

}  // namespace echelon::checks
