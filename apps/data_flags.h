// Flags that go with --data: a tokenizer, and a place for tokens.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "apps/flag_needs.h"
#include "data/tokens.h"

namespace echelon {

class DataFlags {
 public:
  // --tokenizer, --data-cache, --raw-tokens.
  void add_to(CLI::App& app);
  // If no flag names a tokenizer, takes one that is found in `directories` (of models and checkpoints); empty
  // names are skipped.
  DataReading reading(const std::vector<std::string>& directories, const Progress& progress) const;
  // What each flag needs to have an effect.
  std::vector<FlagNeed> needs(const TokenData& data) const;
  static std::vector<FlagNeed> needs_data();  // if there is no data

 private:
  CLI::App* app_ = nullptr;
  std::string tokenizer_ = "bytes", cache_, raw_;
};

}  // namespace echelon
