// Tokenised text as a file (.tokens), made by `echelon data tokenize` and kept in the cache of --data:
//
//   "ECHTOKS2", uint32 width (2 or 4), uint32 0
//   ids: uint16, or uint32 whose highest bit says that the loss does not count the token as a target
//   zeros up to a multiple of 8; for each document uint64: its first token
//   uint64 tokens, documents, counted tokens, one above the largest id, checksum of the tokenizer,
//   XXH3-64 of all before those five, XXH3-64 of those six, "ECHTOKS2"
//
// All little-endian.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/open_file.h"
#include "data/checksum.h"

namespace echelon {

inline constexpr std::uint32_t not_counted = 0x8000'0000u;

struct TokenStoreInfo {
  int width = 2;
  std::int64_t offset = 0;  // of the first id
  std::int64_t tokens = 0, documents = 0, counted = 0;
  std::int64_t vocab = 0;  // one above the largest id
  std::uint64_t tokenizer = 0;
};

// Nothing where the file is none. RequestError where its counts are damaged, or an earlier version wrote it.
std::optional<TokenStoreInfo> token_store_info(const OpenFile& file);
// Reads all of the file: RequestError where tokens or documents are not those that were written.
void check_token_store(const OpenFile& file, const TokenStoreInfo& info);
// The first token of each document.
std::vector<std::int64_t> document_starts(const OpenFile& file, const TokenStoreInfo& info);

class TokenStoreWriter {
 public:
  TokenStoreWriter(const std::string& path, int width, std::uint64_t tokenizer);
  void begin_document() { starts_.push_back(static_cast<std::uint64_t>(info_.tokens)); }
  void write(std::span<const std::uint32_t> ids);  // with not_counted where width is 4
  const TokenStoreInfo& info() const { return info_; }
  void commit();

 private:
  void put(std::span<const std::byte> bytes);

  AtomicFile file_;
  RunningChecksum sum_;  // of what was put there
  TokenStoreInfo info_;
  std::vector<std::uint64_t> starts_;
  std::vector<std::uint16_t> narrow_;
};

}  // namespace echelon
