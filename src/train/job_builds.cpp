#include "train/job_builds.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include "base/error.h"
#include "data/checksum.h"

namespace echelon {

// XXH3-64 of the file that this function is in; empty if it cannot be read.
static std::string own_build() {
  Dl_info info{};
  void* found = nullptr;
  if (::dladdr1(reinterpret_cast<const void*>(&own_build), &info, &found, RTLD_DL_LINKMAP) == 0) return "";
  const std::string library = static_cast<const link_map*>(found)->l_name;  // empty: the program itself
  try {
    return fmt::format("{:016x}", checksum(OpenFile(library.empty() ? "/proc/self/exe" : library)));
  } catch (const std::exception&) {
    return "";
  }
}

std::string note_on_builds(ProcessWorld* processes) {
  if (processes == nullptr) return "";
  const std::vector<std::string> builds = processes->gather(own_build());
  for (std::size_t rank = 1; rank < builds.size(); ++rank)
    if (!builds[rank].empty() && !builds.front().empty() && builds[rank] != builds.front())
      return fmt::format(
          "rank {} ({}) runs another build of echelon than rank 0 ({}): "
          "if it is of another version, all need the same one",
          rank, processes->nodes()[rank], processes->nodes().front());
  return "";
}

}  // namespace echelon
