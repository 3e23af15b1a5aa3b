// Memory and traffic as JSON, the same in every command.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "plan/assumptions.h"
#include "spec/memory.h"
#include "spec/traffic.h"

namespace echelon {

// {"total": n, "parameters": n, ...}
nlohmann::ordered_json as_json(const Memory& memory);
// {"out": n, "back": n, "most": n}
nlohmann::ordered_json as_json(const HostActivations& host);
// {"tp": {"all_reduce": bytes, ...}, ...}
nlohmann::ordered_json as_json(const Traffic& traffic);
nlohmann::ordered_json assumption_names(const std::vector<Assumption>& assumptions);

}  // namespace echelon
