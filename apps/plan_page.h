// The page of plan --html.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "plan/search.h"

namespace echelon {

// `answer`: the object that --json writes. `verb`: the parsed one. Searches again for what surrounds the
// ranked plans, unless surveys_later(). Where no plan fits it says what was left out, and why.
std::string plan_page(const SearchResult& result, const SearchRequest& request, const std::string& answer,
                      const CLI::App& verb);

// The page's member `survey`: survey() as JSON, each plan with the command that prices it alone.
std::string plan_survey(const SearchRequest& request, const CLI::App& verb);

// Whether a page is drawn first and asks for its survey then: so it is in a browser.
bool surveys_later();

}  // namespace echelon
