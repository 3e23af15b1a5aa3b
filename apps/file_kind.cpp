#include "apps/file_kind.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/error.h"

namespace echelon {

void check_kind(std::string_view flag, const std::string& path, const FileKind& kind) {
  static constexpr std::array<std::string_view, 14> known{".csv", ".gif",  ".htm",   ".html", ".jpeg",
                                                          ".jpg", ".json", ".jsonl", ".md",   ".pdf",
                                                          ".png", ".svg",  ".toml",  ".txt"};
  const std::filesystem::path name(path);
  const std::string found = name.extension().string();
  if (found == kind.ending || (kind.ending == ".html" && found == ".htm")) return;
  if (std::find(known.begin(), known.end(), found) == known.end()) return;
  const std::string other =
      found == kind.other_ending ? fmt::format(", or {} {}", kind.other_flag, path) : std::string();
  refuse("{} {}: is {}, whose name cannot end in {}; legal: {}{}", flag, path, kind.what, found,
         std::filesystem::path(name).replace_extension(kind.ending).string(), other);
}

}  // namespace echelon
