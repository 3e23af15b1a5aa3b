// Names that were misspelt.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// The least number of letters to insert, leave out, replace or exchange with their neighbour that makes one
// text the other, where no part is edited twice. (Damerau 1964; the optimal string alignment distance.)
int edits(std::string_view from, std::string_view to);

// Which of `names` was probably meant by a text that is none of them: the one with the fewest edits, small
// and capital letters alike, if these are at most a third of the text's letters, or one; else the only one
// that begins with the text; else, of a text of 4 letters or more, the shortest that contains it. Of equals,
// the one that has more of its beginning in common. Empty: none comes near, or one no nearer than another.
std::string nearest(std::string_view text, const std::vector<std::string>& names);

// " (did you mean NAME?)" where one of the names is near, " (did you mean NAME, NAME or NAME?)" where a few
// begin with a text of 3 letters or more, else nothing.
std::string did_you_mean(std::string_view text, const std::vector<std::string>& names);

}  // namespace echelon
