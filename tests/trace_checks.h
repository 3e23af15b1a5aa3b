// What a trace of all ranks must be, whatever was run: read from the JSON that people load.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "spec/traffic.h"

namespace echelon::checks {

struct ReadTrace {
  std::vector<std::string> ranks;                                // names of the processes, by pid
  std::vector<std::set<std::string>> names;                      // of the slices of each
  std::vector<std::map<std::string, std::set<std::string>>> on;  // the same by row
  std::vector<std::map<std::int64_t, Traffic>> sent;             // of each, by step; 0: between steps
  std::int64_t arrows = 0;
};

inline std::int64_t nanoseconds_of(const nlohmann::json& microseconds) {
  return std::llround(1e3 * microseconds.get<double>());
}

// Fails where slices of a row overlap without lying inside one another, a row has no name, or an arrow has
// one end.
inline ReadTrace read_trace(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  ReadTrace read;
  std::map<std::pair<std::size_t, int>, std::string> rows;
  std::map<std::pair<std::size_t, int>, std::vector<std::pair<std::int64_t, std::int64_t>>> slices;
  std::map<std::int64_t, std::vector<std::pair<std::string, std::size_t>>> arrows;
  for (const auto& e : json.at("traceEvents")) {
    const std::string phase = e.at("ph");
    const auto pid = e.at("pid").get<std::size_t>();
    const auto row = std::pair{pid, e.at("tid").get<int>()};
    if (phase == "M") {
      if (e.at("name") == "process_name") {
        EXPECT_EQ(pid, read.ranks.size());
        read.ranks.push_back(e.at("args").at("name"));
      }
      if (e.at("name") == "thread_name") rows[row] = e.at("args").at("name");
      continue;
    }
    if (phase == "s" || phase == "f") {
      arrows[e.at("id").get<std::int64_t>()].emplace_back(phase, pid);
      continue;
    }
    EXPECT_EQ(phase, "X");
    EXPECT_TRUE(rows.contains(row)) << e;
    read.names.resize(read.ranks.size());
    read.on.resize(read.ranks.size());
    read.sent.resize(read.ranks.size());
    read.names[pid].insert(e.at("name"));
    read.on[pid][rows[row]].insert(e.at("name"));
    const std::int64_t begin = nanoseconds_of(e.at("ts")), length = nanoseconds_of(e.at("dur"));
    EXPECT_GE(length, 0) << e;
    slices[row].emplace_back(begin, begin + length);
    const std::string category = e.at("cat"), name = e.at("name");
    if (category != "communication" || rows[row].find("messages") != std::string::npos) continue;
    const auto& args = e.at("args");
    EXPECT_EQ(args.at("in_call_ns").get<std::int64_t>() + args.at("hidden_ns").get<std::int64_t>() +
                  args.at("waited_ns").get<std::int64_t>(),
              length)
        << e;
    bool known = false;
    for (Axis axis : traffic_axes)
      for (Verb verb : all_verbs)
        if (name == std::string(axis_name(axis)) + " " + verb_name(verb)) {
          EXPECT_EQ(rows[row].substr(0, 2), axis_name(axis)) << e;
          VerbTraffic& cell = read.sent[pid][args.value("step", std::int64_t{0})].at(axis, verb);
          cell.calls += 1;
          cell.bytes += args.at("bytes").get<std::int64_t>();
          known = true;
        }
    EXPECT_TRUE(known) << e;
  }
  for (const auto& [row, all] : slices) {
    std::vector<std::int64_t> open;
    std::int64_t last = std::numeric_limits<std::int64_t>::min();
    for (const auto& [begin, end] : all) {
      EXPECT_GE(begin, last) << rows[row];  // in the order of their begins, the outer first
      last = begin;
      while (!open.empty() && open.back() <= begin) open.pop_back();
      if (!open.empty()) {
        EXPECT_LE(end, open.back()) << read.ranks[row.first] << ", " << rows[row];
      }
      open.push_back(end);
    }
  }
  for (const auto& [id, ends] : arrows) {
    EXPECT_EQ(ends.size(), 2u) << id;
    if (ends.size() != 2) continue;
    EXPECT_NE(ends[0].first, ends[1].first);
    EXPECT_NE(ends[0].second, ends[1].second) << "a message to itself";
    ++read.arrows;
  }
  return read;
}

}  // namespace echelon::checks
