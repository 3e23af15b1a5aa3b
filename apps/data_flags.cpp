#include "apps/data_flags.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

// The cache directory of the XDG Base Directory Specification; empty if there is no home directory.
std::string users_cache() {
  namespace fs = std::filesystem;
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && fs::path(cache).is_absolute()) return fs::path(cache) / "echelon/tokens";
  const char* const home = std::getenv("HOME");
  return home != nullptr && fs::path(home).is_absolute() ? fs::path(home) / ".cache/echelon/tokens"
                                                         : fs::path();
}

}  // namespace

void DataFlags::add_to(CLI::App& app) {
  app_ = &app;
  app.add_option("--tokenizer", tokenizer_,
                 "Tokenizer of text: bytes, a file, or a directory with one (default: that of the weights, "
                 "else bytes)")
      ->type_name("bytes|PATH");
  app.add_option("--data-cache", cache_,
                 "Directory that keeps the tokens of text (default: echelon/tokens in the user's cache)")
      ->type_name("DIR");
  app.add_option("--raw-tokens", raw_, "Read .bin files without a header as ids of this type")
      ->type_name("uint16|uint32");
}

DataReading DataFlags::reading(const std::vector<std::string>& directories, const Progress& progress) const {
  DataReading reading;
  std::string tokenizer = tokenizer_;
  if (!is_given(*app_, "--tokenizer")) {
    const auto found = std::find_if(directories.begin(), directories.end(), has_tokenizer);
    if (found != directories.end()) tokenizer = *found;
  }
  reading.text = text_tokens(tokenizer);
  reading.cache_directory = cache_.empty() ? users_cache() : cache_;
  if (!raw_.empty() && raw_ != "uint16" && raw_ != "uint32")
    refuse("--raw-tokens {}: legal: uint16, uint32", raw_);
  reading.raw_width = raw_.empty() ? 0 : raw_ == "uint16" ? 2 : 4;
  reading.threads = available_cores();
  reading.progress = progress;
  return reading;
}

std::vector<FlagNeed> DataFlags::needs_data() {
  std::vector<FlagNeed> needs;
  for (const char* flag : {"--tokenizer", "--data-cache", "--raw-tokens"})
    needs.push_back({flag, false, "without --data", {advice("--data", "PATH")}});
  return needs;
}

std::vector<FlagNeed> DataFlags::needs(const TokenData& data) const {
  const bool raw = std::any_of(data.files().begin(), data.files().end(),
                               [](const TokenData::File& file) { return file.kind == "ids alone"; });
  return {{"--tokenizer", data.from_text(), "with token files", {}},
          {"--data-cache", data.from_text(), "with token files", {}},
          {"--raw-tokens", raw, "without .bin files that have no header", {}}};
}

}  // namespace echelon
