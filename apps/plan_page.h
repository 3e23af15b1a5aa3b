// The page of plan --html.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "plan/search.h"

namespace echelon {

// `answer`: the object that --json writes. `verb`: the parsed one. Searches again for what surrounds the
// ranked plans (survey()).
std::string plan_page(const SearchResult& result, const SearchRequest& request, const std::string& answer,
                      const CLI::App& verb);

}  // namespace echelon
