// The flags of simulate --document-lengths: how evenly sequences packed from documents are divided over the
// ranks of a cp group.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace echelon {

struct PackingFlags {
  void add_to(CLI::App& app);
  bool is_asked() const { return !lengths_.empty(); }
  // RequestError for a flag of another kind of simulation, or for a flag of this kind without
  // --document-lengths.
  void refuse_strangers() const;
  void print(bool json) const;

 private:
  const CLI::App* app_ = nullptr;
  std::string lengths_;
  std::int64_t seq_len_ = 8192, sequences_ = 256;
  int cp_ = 4;
};

}  // namespace echelon
