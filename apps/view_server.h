// A run's page for a browser on this machine, anew as the run goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "draw/page.h"

namespace echelon {

struct ServedTrace {
  std::string name, path;  // the name has no directory in it
  std::int64_t bytes = 0;
};

// Each is asked whenever a browser asks; from several threads at a time.
struct ServedView {
  std::function<std::string()> tag;  // another one whenever the page or the traces would be others
  std::function<Page(const std::string& tag)> page;
  std::function<std::vector<ServedTrace>()> traces;
};

// Serves on 127.0.0.1 alone until SIGINT or SIGTERM: `/`, `/document.json` (304 where If-None-Match has its
// tag) and
// `/trace/NAME`. Refuses whoever calls this machine by another name than localhost or 127.0.0.1, as a page
// from elsewhere can whose name was bound to this address. `port` 0: one that the system chooses. `begun`
// gets the address when it can be opened. RequestError naming --port where it is not to be had.
void serve_view(const ServedView& view, int port, const std::function<void(const std::string&)>& begun);

}  // namespace echelon
