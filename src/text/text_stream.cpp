#include <algorithm>

#include "base/utf8.h"
#include "text/tokenizer.h"

namespace echelon {
namespace {

constexpr std::string_view broken_mark =
    "\xef\xbf\xbd";  // U+FFFD: of half a character, it may become another

// The bytes of a character that the end cuts off.
std::size_t cut_off(std::string_view text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0u) == 0x80u) continue;
    const std::size_t whole = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 1;
    return whole > back ? back : 0;
  }
  return 0;
}

}  // namespace

std::string TextStream::next(std::int32_t id) {
  ids_.push_back(id);
  return take(false);
}

std::string TextStream::finish() { return take(true); }

std::string TextStream::take(bool all) {
  const std::span<const std::int32_t> ids(ids_);
  const std::string before = tokenizer_->decode(ids.subspan(context_, written_ - context_), Special::dropped);
  const std::string now = tokenizer_->decode(ids.subspan(context_), Special::dropped);
  const bool whole = !now.ends_with(broken_mark) && cut_off(now) == 0;
  // A character takes at most four tokens of a byte: what ends in broken ones for longer is not waited for.
  if (now.size() <= before.size() || (!all && !whole && ids_.size() - written_ < 8)) return "";
  context_ = written_;
  written_ = ids_.size();
  return now.substr(before.size());
}

}  // namespace echelon
