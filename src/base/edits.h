// Suggestions for misspelt names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// ASCII letters only.
std::string in_small_letters(std::string_view text);

// The edit distance: the least number of insertions, deletions, replacements or swaps of neighbouring letters
// that turn one text into the other, with no part edited twice. (Damerau 1964; optimal string alignment
// distance.)
int edits(std::string_view from, std::string_view to);

// The name that an unknown text probably means. First choice: the name with the fewest edits, ignoring case,
// if these are at most a third of the text's letters, or one. Else the only name that begins with the text;
// else, for a text of 4 letters or more, the shortest that contains it. Ties go to the name with the longer
// common beginning. Empty if no name is near, or several are equally near.
std::string nearest(std::string_view text, const std::vector<std::string>& names);

// " (did you mean NAME?)" if a name is near; " (did you mean NAME, NAME or NAME?)" if a few begin with a text
// of 3 letters or more; else empty.
std::string did_you_mean(std::string_view text, const std::vector<std::string>& names);

}  // namespace echelon
