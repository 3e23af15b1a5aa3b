// What the name of a file to be written promises.
#pragma once

#include <string>
#include <string_view>

namespace echelon {

// RequestError if the name ends as files of another kind do: `what`, as "a page", stands in names that end in
// `ending`. Any other end, and none, is the user's own.
void check_kind(std::string_view flag, const std::string& path, std::string_view what,
                const std::string& ending);

}  // namespace echelon
