// The page of plan --html.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "plan/near_sizes.h"
#include "plan/search.h"

namespace echelon {

// `answer`: the object that --json writes. `verb`: after parsing. Searches again for the plans around the
// ranked ones, unless surveys_later(). If no plan fits, the page says what was left out, and why, and which
// of `near` are legal.
std::string plan_page(const SearchResult& result, const SearchRequest& request,
                      const std::vector<NearSize>& near, const std::string& answer, const CLI::App& verb);

// The page's member `survey`: survey() as JSON, each plan with the command that prices only that plan.
std::string plan_survey(const SearchRequest& request, const CLI::App& verb);

// Whether a page is drawn first and requests its survey later, as in a browser.
bool surveys_later();

}  // namespace echelon
