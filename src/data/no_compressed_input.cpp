// A build for planning alone: what is compressed takes libraries.
#include "base/error.h"
#include "data/text_input.h"

namespace echelon {

std::unique_ptr<TextInput> open_gzip(const OpenFile& file) {
  refuse("--data {}: this build (ECHELON_PLANNER_ONLY) reads nothing compressed", file.path());
}
std::unique_ptr<TextInput> open_zstd(const OpenFile& file) { return open_gzip(file); }

}  // namespace echelon
