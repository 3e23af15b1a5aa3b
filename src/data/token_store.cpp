#include "data/token_store.h"

#include <array>
#include <cstring>

#include "base/error.h"
#include "data/checksum.h"

namespace echelon {
namespace {

constexpr std::array<char, 8> store_magic{'E', 'C', 'H', 'T', 'O', 'K', 'S', '1'};
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

}  // namespace

std::optional<TokenStoreInfo> token_store_info(const OpenFile& file) {
  const std::int64_t size = file.size();
  if (size < 8) return {};
  std::array<char, 8> begin{};
  file.read(0, std::as_writable_bytes(std::span(begin)));
  if (begin != store_magic) return {};
  const auto damaged = [&](const char* why) {
    refuse("--data {}: damaged file of tokens: {}; make it again", file.path(), why);
  };
  if (size < header_size + footer_size) damaged("it is cut short");
  std::array<std::uint32_t, 2> shape{};
  file.read(8, std::as_writable_bytes(std::span(shape)));
  if (shape[0] != 2 && shape[0] != 4) damaged("its ids have neither 2 nor 4 bytes");
  Footer footer{};
  file.read(size - footer_size, std::as_writable_bytes(std::span(footer)));
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
  file_.write(store_magic.data(), store_magic.size());
  const std::array<std::uint32_t, 2> shape{static_cast<std::uint32_t>(width), 0};
  file_.write(shape.data(), sizeof shape);
}

void TokenStoreWriter::write(std::span<const std::uint32_t> ids) {
  for (const std::uint32_t id : ids) {
    info_.counted += (id & not_counted) == 0;
    info_.vocab = std::max<std::int64_t>(info_.vocab, (id & ~not_counted) + std::int64_t{1});
  }
  info_.tokens += std::ssize(ids);
  if (info_.width == 4) return file_.write(ids.data(), ids.size_bytes());
  narrow_.assign(ids.begin(), ids.end());
  check(info_.vocab <= 65536, "an id of two bytes");
  file_.write(narrow_.data(), 2 * narrow_.size());
}

void TokenStoreWriter::commit() {
  const std::int64_t end = info_.offset + info_.tokens * info_.width;
  const std::array<char, 8> zeros{};
  file_.write(zeros.data(), static_cast<std::size_t>(padded(end) - end));
  info_.documents = std::ssize(starts_);
  file_.write(starts_.data(), 8 * starts_.size());
  Footer footer{static_cast<std::uint64_t>(info_.tokens),
                static_cast<std::uint64_t>(info_.documents),
                static_cast<std::uint64_t>(info_.counted),
                static_cast<std::uint64_t>(info_.vocab),
                info_.tokenizer,
                0,
                0,
                magic_word()};
  footer[6] = seal_of(footer);
  file_.write(footer.data(), sizeof footer);
  file_.commit();
}

}  // namespace echelon
