// What --data needs beside it: a tokenizer, a place for tokens.
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
  // With `directories`, of models and checkpoints, a tokenizer that lies in one of them is taken where no
  // flag names one; empty ones are passed over.
  DataReading reading(const std::vector<std::string>& directories, const Progress& progress) const;
  // What each needs to act.
  std::vector<FlagNeed> needs(const TokenData& data) const;
  static std::vector<FlagNeed> needs_data();  // where there is none

 private:
  CLI::App* app_ = nullptr;
  std::string tokenizer_ = "bytes", cache_, raw_;
};

}  // namespace echelon
