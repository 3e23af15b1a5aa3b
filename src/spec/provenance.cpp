#include "spec/provenance.h"

#include <set>
#include <sstream>

namespace echelon {

void mark_fitted(Provenance& provenance, const std::string& before, const std::string& after) {
  std::set<std::string> known;
  std::istringstream old_lines(before), lines(after);
  for (std::string line; std::getline(old_lines, line);) known.insert(line);
  std::string table;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("[[")) table = line.substr(2, line.size() - 4);
    const auto equals = line.find(" = ");
    if (equals == std::string::npos || known.contains(line)) continue;
    const std::string value = line.substr(equals + 3);
    const bool is_number = value.find_first_not_of("0123456789.e+-") == std::string::npos;
    if (!is_number && value != "true" && value != "false") continue;
    const std::string key = table.empty() ? line.substr(0, equals) : table;
    for (auto* list : {&provenance.measured, &provenance.published})
      if (*list) std::erase(**list, key);
    if (!provenance.fitted) provenance.fitted.emplace();
    if (std::find(provenance.fitted->begin(), provenance.fitted->end(), key) == provenance.fitted->end())
      provenance.fitted->push_back(key);
  }
}

}  // namespace echelon
