#include "data/token_store.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "data/checksum.h"

namespace echelon {
namespace {

constexpr std::array<char, 8> store_magic{'E', 'C', 'H', 'T', 'O', 'K', 'S', '2'};
// Of files that have no checksum of their tokens.
constexpr std::array<char, 8> first_magic{'E', 'C', 'H', 'T', 'O', 'K', 'S', '1'};
constexpr std::int64_t header_size = 16, footer_size = 64;
constexpr std::int64_t most_tokens = std::int64_t{1} << 48;  // no sum of sizes overflows below

using Footer = std::array<std::uint64_t, 8>;

std::uint64_t magic_word() {
  std::uint64_t word = 0;
  std::memcpy(&word, store_magic.data(), 8);
  return word;
}

std::uint64_t seal_of(const Footer& footer) { return checksum(std::as_bytes(std::span(footer).first(6))); }

std::int64_t padded(std::int64_t bytes) { return (bytes + 7) / 8 * 8; }

[[noreturn]] void refuse_damaged(const OpenFile& file, const char* why) {
  refuse("--data {}: damaged file of tokens: {}; make it again", file.path(), why);
}

// One above the largest of some ids.
template <class Id>
std::int64_t vocab_of(std::span<const std::byte> ids, Id mark) {
  Id largest = 0;  // a loop without a branch runs at the speed of memory
  for (std::size_t at = 0; at < ids.size(); at += sizeof(Id)) {
    Id id = 0;
    std::memcpy(&id, ids.data() + at, sizeof(Id));
    largest = std::max<Id>(largest, id & static_cast<Id>(~mark));
  }
  return std::int64_t{largest} + 1;
}

Footer footer_of(const OpenFile& file) {
  Footer footer{};
  file.read(file.size() - footer_size, std::as_writable_bytes(std::span(footer)));
  return footer;
}

}  // namespace

std::optional<TokenStoreInfo> token_store_info(const OpenFile& file) {
  const std::int64_t size = file.size();
  if (size < 8) return {};
  std::array<char, 8> begin{};
  file.read(0, std::as_writable_bytes(std::span(begin)));
  if (begin == first_magic)
    refuse("--data {}: a file of tokens of an earlier version, without their checksum; make it again",
           file.path());
  if (begin != store_magic) return {};
  const auto damaged = [&](const char* why) { refuse_damaged(file, why); };
  if (size < header_size + footer_size) damaged("it is cut short");
  std::array<std::uint32_t, 2> shape{};
  file.read(8, std::as_writable_bytes(std::span(shape)));
  if (shape[0] != 2 && shape[0] != 4) damaged("its ids have neither 2 nor 4 bytes");
  const Footer footer = footer_of(file);
  if (footer[7] != magic_word()) damaged("it is cut short");
  if (footer[6] != seal_of(footer)) damaged("its checksum is another one");
  for (std::size_t i = 0; i < 4; ++i)
    if (footer[i] > most_tokens) damaged("its counts are too large");
  TokenStoreInfo info{static_cast<int>(shape[0]),
                      header_size,
                      static_cast<std::int64_t>(footer[0]),
                      static_cast<std::int64_t>(footer[1]),
                      static_cast<std::int64_t>(footer[2]),
                      static_cast<std::int64_t>(footer[3]),
                      footer[4]};
  if (padded(header_size + info.tokens * info.width) + 8 * info.documents + footer_size != size)
    damaged("its size is not what its counts make");
  return info;
}

void check_token_store(const OpenFile& file, const TokenStoreInfo& info) {
  const std::int64_t ids_end = info.offset + info.tokens * info.width, end = file.size() - footer_size;
  RunningChecksum sum;
  std::int64_t vocab = 0;
  std::vector<std::byte> piece(1 << 20);
  for (std::int64_t at = 0; at < end;) {
    // A piece has ids or something else, never both.
    const std::int64_t until = at < info.offset ? info.offset : at < ids_end ? ids_end : end;
    const auto here =
        std::span(piece).first(static_cast<std::size_t>(std::min(std::ssize(piece), until - at)));
    file.read(at, here);
    sum.add(here);
    if (until == ids_end && ids_end > info.offset)
      vocab = std::max(vocab, info.width == 2 ? vocab_of<std::uint16_t>(here, 0)
                                              : vocab_of<std::uint32_t>(here, not_counted));
    at += std::ssize(here);
  }
  if (sum.take() != footer_of(file)[5] || vocab != info.vocab)
    refuse_damaged(file, "the checksum of its tokens is another one");
}

std::vector<std::int64_t> document_starts(const OpenFile& file, const TokenStoreInfo& info) {
  std::vector<std::int64_t> starts(static_cast<std::size_t>(info.documents));
  file.read(padded(info.offset + info.tokens * info.width), std::as_writable_bytes(std::span(starts)));
  for (std::size_t i = 0; i < starts.size(); ++i)
    if (starts[i] < (i == 0 ? 0 : starts[i - 1]) || starts[i] > info.tokens)
      refuse("--data {}: damaged file of tokens: document {} begins at token {}; make it again", file.path(),
             i, starts[i]);
  return starts;
}

TokenStoreWriter::TokenStoreWriter(const std::string& path, int width, std::uint64_t tokenizer)
    : file_(path) {
  info_.width = width;
  info_.offset = header_size;
  info_.tokenizer = tokenizer;
  put(std::as_bytes(std::span(store_magic)));
  const std::array<std::uint32_t, 2> shape{static_cast<std::uint32_t>(width), 0};
  put(std::as_bytes(std::span(shape)));
}

void TokenStoreWriter::write(std::span<const std::uint32_t> ids) {
  for (const std::uint32_t id : ids) {
    info_.counted += (id & not_counted) == 0;
    info_.vocab = std::max<std::int64_t>(info_.vocab, (id & ~not_counted) + std::int64_t{1});
  }
  info_.tokens += std::ssize(ids);
  if (info_.width == 4) return put(std::as_bytes(ids));
  narrow_.assign(ids.begin(), ids.end());
  check(info_.vocab <= 65536, "an id of two bytes");
  put(std::as_bytes(std::span(narrow_)));
}

void TokenStoreWriter::put(std::span<const std::byte> bytes) {
  sum_.add(bytes);
  file_.write(bytes.data(), bytes.size());
}

void TokenStoreWriter::commit() {
  const std::int64_t end = info_.offset + info_.tokens * info_.width;
  const std::array<char, 8> zeros{};
  put(std::as_bytes(std::span(zeros)).first(static_cast<std::size_t>(padded(end) - end)));
  info_.documents = std::ssize(starts_);
  put(std::as_bytes(std::span(starts_)));
  Footer footer{static_cast<std::uint64_t>(info_.tokens),
                static_cast<std::uint64_t>(info_.documents),
                static_cast<std::uint64_t>(info_.counted),
                static_cast<std::uint64_t>(info_.vocab),
                info_.tokenizer,
                sum_.take(),
                0,
                magic_word()};
  footer[6] = seal_of(footer);
  file_.write(footer.data(), sizeof footer);
  file_.commit();
}

}  // namespace echelon
