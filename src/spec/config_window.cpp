#include <algorithm>

#include "spec/config_window.h"

namespace echelon {

WindowSpec window_of(const std::vector<bool>& in, std::int64_t size) {
  if (std::find(in.begin(), in.end(), true) == in.end()) return {};
  const bool full_first = !in.front();
  const auto first_full = std::find(in.begin() + full_first, in.end(), false);
  const std::int64_t before = first_full - in.begin();
  const WindowSpec window{size, full_first ? before : first_full == in.end() ? 0 : before + 1, full_first};
  WindowSpec listed{size};
  bool is_regular = true;
  for (std::int64_t layer = 0; layer < std::ssize(in); ++layer) {
    const bool has = in[static_cast<std::size_t>(layer)];
    is_regular = is_regular && window.in(layer) == has;
    if (!has) listed.full_layers.push_back(layer);
  }
  return is_regular ? window : listed;
}

WindowSpec plain_window(const ModelSpec& m) {
  if (m.window.size == 0 || (m.window.size >= m.max_seq && m.rope.local_theta == 0)) return {};
  std::vector<bool> in(static_cast<std::size_t>(m.num_layers));
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    in[static_cast<std::size_t>(layer)] = m.window.in(layer);
  return window_of(in, m.window.size);
}

WindowSpec read_window(const Config& config, bool in_all, bool typed, ModelSpec& m) {
  std::vector<bool> in(static_cast<std::size_t>(m.num_layers), in_all);
  if (config.has("layer_types")) {
    const Json& types = one_for_each_layer(config, "layer_types", m.num_layers);
    for (std::size_t i = 0; i < types.size(); ++i) {
      if (types[i] != "full_attention" && types[i] != "sliding_attention")
        config.wrong("layer_types", "full_attention and sliding_attention");
      in[i] = types[i] == "sliding_attention";
      if (!typed && in[i] != in_all)
        config.wrong("layer_types", in_all ? "sliding_attention" : "full_attention");
    }
  }
  if (std::find(in.begin(), in.end(), true) == in.end()) return {};
  const std::int64_t size = config.integer("sliding_window");
  WindowSpec window = window_of(in, size);
  if (size < m.max_seq || m.rope.local_theta > 0) m.window = window;
  return window;
}

void read_turned_windows(const Config& config, ModelSpec& m, const char* interval) {
  config.required("sliding_window");
  WindowSpec window;
  if (config.has("layer_types")) {
    window = read_window(config, false, true, m);
  } else {
    window = {config.integer("sliding_window"), config.integer_or(interval, 4)};
    if (window.full_every > m.num_layers) window.full_every = 0;  // this many have no full one
    if (window.full_every == 1) window = {};
    if (window.size < m.max_seq) m.window = window;
  }
  if (window.full_first || !window.full_layers.empty())
    config.wrong("layer_types", "sliding_attention in all layers or in all but each n-th");
  m.rope.unturned_every = window.size == 0 ? 1 : window.full_every;
}

}  // namespace echelon
