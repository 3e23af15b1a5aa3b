// Serves a run's page to a browser on this machine, updated as the run proceeds.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "draw/page.h"

namespace echelon {

struct ServedTrace {
  std::string name, path;  // the name contains no directory
  std::int64_t bytes = 0;
};

// Each function is called at a browser's request, from several threads at once.
struct ServedView {
  std::function<std::string()> tag;  // changes whenever the page or the traces change
  std::function<Page(const std::string& tag)> page;
  std::function<std::vector<ServedTrace>()> traces;
};

// Serves only on 127.0.0.1 until SIGINT or SIGTERM: `/`, `/document.json` (304 if If-None-Match has its tag)
// and `/trace/NAME`. Refuses requests that name this machine other than localhost or 127.0.0.1, as a foreign
// page can whose name was bound to this address. `port` 0: the system chooses one. `begun` gets the address
// once it can be opened. RequestError naming --port if it is not available.
void serve_view(const ServedView& view, int port, const std::function<void(const std::string&)>& begun);

}  // namespace echelon
