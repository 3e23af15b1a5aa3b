#include "plan/measurements.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/parse_number.h"
#include "plan/measured_fields.h"

namespace echelon {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.ends_with('\r')) line.pop_back();
    lines.push_back(line);
  }
  return lines;
}

std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  std::istringstream in(line);
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// RequestError unless it is a number above 0.
double positive(const std::string& text, const std::string& where, const std::string& name) {
  const double value = parse_number<double>(fmt::format("{}: {}", where, name), text);
  if (!(std::isfinite(value) && value > 0))
    refuse("{}: {} {} is not legal: must be above 0", where, name, text);
  return value;
}

// ---- nccl-tests

std::optional<Verb> verb_in(const std::string& text) {
  const std::pair<const char*, Verb> names[] = {
      {"all_reduce", Verb::all_reduce},         {"allreduce", Verb::all_reduce},
      {"all_gather", Verb::all_gather},         {"allgather", Verb::all_gather},
      {"reduce_scatter", Verb::reduce_scatter}, {"reducescatter", Verb::reduce_scatter},
      {"alltoall", Verb::all_to_all},           {"all_to_all", Verb::all_to_all}};
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const auto& [name, verb] : names)
    if (lower.find(name) != std::string::npos) return verb;
  return {};
}

bool is_of_nccl_tests(const std::vector<std::string>& lines) {
  return std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
    return line.starts_with("#") && line.find("algbw") != std::string::npos &&
           line.find("busbw") != std::string::npos;
  });
}

void read_nccl_tests(const std::vector<std::string>& lines, const std::string& file, Measurements& into) {
  std::optional<Verb> verb;
  std::set<std::string> hosts;
  std::int64_t ranks = 0;
  std::size_t time = 0, fields = 0;
  std::int64_t read = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::vector<std::string> words = words_of(lines[i]);
    if (words.empty()) continue;
    if (words[0].starts_with("#")) {
      if (lines[i].find("Collective test starting") != std::string::npos) verb = verb_in(lines[i]);
      // "#  Rank  0 Group  0 Pid  4711 on  node01 device  0 [0x07] NVIDIA A100"
      const auto on = std::find(words.begin(), words.end(), "on");
      if (words.size() > 2 && words[1] == "Rank" && on != words.end() && on + 1 != words.end()) {
        if (words[2] == "0") hosts.clear(), ranks = 0;  // of the next test in the file
        hosts.insert(on[1]);
        ++ranks;
      }
      if (const auto at = std::find(words.begin(), words.end(), "time");
          at != words.end() && words[1] == "size") {
        time = static_cast<std::size_t>(at - words.begin()) - 1;  // without the "#"
        fields = words.size() - 1;
      }
      continue;
    }
    const FilePlace place{file, i + 1};
    if (!std::isdigit(static_cast<unsigned char>(words[0][0]))) continue;  // what the hosts print beside it
    if (time == 0) refuse("{}: a measurement before the line that names its columns", place.text());
    if (words.size() < fields)
      refuse("{}: has {} columns of the {} that nccl-tests name", place.text(), words.size(), fields);
    if (!verb) verb = verb_in(file);
    if (!verb)
      refuse(
          "--from {}: does not say which collective this is; name the file so that it has one of all_reduce, "
          "all_gather, reduce_scatter, alltoall",
          file);
    if (ranks < 2)
      refuse("{}: the ranks are not said before it: lines \"# Rank 0 ... on HOST ...\", two at least",
             place.text());
    MeasuredCollective one;
    one.verb = *verb;
    one.ranks = ranks;
    one.hosts = static_cast<std::int64_t>(hosts.size());
    const FilePlace size{file, i + 1, 1}, seconds{file, i + 1, time + 1};
    one.bytes = parse_number<double>(size.text() + ": size", words[0]);
    one.seconds = 1e-6 * positive(words[time], seconds.text(), "time");
    one.where = fmt::format("{}, line {}", file, i + 1);
    ++read;
    if (one.bytes > 0) into.collectives.push_back(one);
  }
  if (read == 0) refuse("--from {}: nccl-tests' output without a measurement", file);
}

// ---- tables

struct TableCell {
  std::string text;
  std::string where;
};

std::vector<std::string> cells_of(const std::string& line, const FilePlace& place) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (char c : line) {
    if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      cells.emplace_back();
    else
      cells.back() += c;
  }
  if (quoted) refuse("{}: a quote is not closed", place.text());
  for (std::string& cell : cells) {
    cell.erase(0, cell.find_first_not_of(" \t"));
    cell.erase(cell.find_last_not_of(" \t") + 1);
  }
  return cells;
}

// Rows by the names of their columns.
struct CsvTable {
  std::vector<std::string> names;
  std::vector<std::map<std::string, TableCell>> rows;
  GivenFields remarks;
  bool has(const std::string& name) const {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
};

CsvTable table_of(const std::vector<std::string>& lines, const std::string& file) {
  CsvTable table;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const FilePlace place{file, i + 1};
    if (read_remark(lines[i], place.text(), table.remarks)) continue;
    if (lines[i].empty() || lines[i][0] == '#') continue;
    std::vector<std::string> cells = cells_of(lines[i], place);
    if (table.names.empty()) {
      for (std::string& name : cells) std::replace(name.begin(), name.end(), '_', '-');
      table.names = cells;
      for (std::size_t c = 0; c < cells.size(); ++c)
        if (std::count(cells.begin(), cells.begin() + static_cast<std::ptrdiff_t>(c), cells[c]) > 0)
          refuse("{}: two columns are named \"{}\"", FilePlace{file, i + 1, c + 1}.text(), cells[c]);
      continue;
    }
    if (cells.size() != table.names.size())
      refuse("{}: has {} columns, and the header {}", place.text(), cells.size(), table.names.size());
    auto& row = table.rows.emplace_back();
    for (std::size_t c = 0; c < cells.size(); ++c)
      row[table.names[c]] = {cells[c], FilePlace{file, i + 1, c + 1}.text()};
  }
  return table;
}

void read_products(const CsvTable& table, const std::string& file, Measurements& into) {
  const std::vector<std::string> units{"seconds", "ms", "us", "tflops"};
  const std::set<std::string> known{"m", "n", "k", "batch", "precision", "seconds", "ms", "us", "tflops"};
  for (const std::string& name : table.names)
    if (!known.contains(name))
      refuse("--from {}: column {} is not known; a table of products has {}", file, name,
             fmt::join(known, ", "));
  const auto unit = std::find_if(units.begin(), units.end(), [&](const auto& one) { return table.has(one); });
  if (unit == units.end())
    refuse("--from {}: no column says how long a product took; give one of {}", file, fmt::join(units, ", "));
  if (table.rows.empty()) refuse("--from {}: has no rows", file);
  for (const auto& row : table.rows) {
    const auto number = [&](const std::string& name) {
      return positive(row.at(name).text, row.at(name).where, name);
    };
    MeasuredProduct p;
    p.rows = number("m"), p.cols = number("n"), p.depth = number("k");
    if (table.has("batch")) p.count = number("batch");
    if (table.has("precision"))
      p.precision = parse_precision(row.at("precision").text, row.at("precision").where + ": precision");
    const double value = number(*unit);
    p.seconds = *unit == "tflops" ? 2 * p.rows * p.cols * p.depth * p.count / (1e12 * value)
                : *unit == "us"   ? 1e-6 * value
                : *unit == "ms"   ? 1e-3 * value
                                  : value;
    p.where = row.at("m").where.substr(7, row.at("m").where.rfind(", column") - 7);
    into.products.push_back(p);
  }
}

void read_steps(const CsvTable& table, const std::string& file, const std::string& model,
                Measurements& into) {
  if (table.rows.empty()) refuse("--from {}: has no rows", file);
  for (const auto& row : table.rows) {
    GivenFields fields = table.remarks;
    for (const auto& [name, cell] : row)
      if (name != "seconds" && !cell.text.empty()) fields[name] = {cell.text, cell.where};
    const std::string& where = row.at("seconds").where;
    const std::string line = where.substr(0, where.rfind(", column"));
    const std::string& seconds = row.at("seconds").text;
    if (seconds.empty())
      into.candidates.push_back(measured_step(fields, model, 0, line));
    else
      into.steps.push_back(measured_step(fields, model, positive(seconds, where, "seconds"), line));
  }
}

}  // namespace

void read_measurements(const std::string& text, const std::string& file, const std::string& model,
                       Measurements& into) {
  constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";  // which spreadsheets write first
  if (text.starts_with(byte_order_mark))
    return read_measurements(text.substr(byte_order_mark.size()), file, model, into);
  const std::vector<std::string> lines = lines_of(text);
  std::vector<std::string> printed = lines;
  for (std::string& line : printed) line.erase(0, rank_prefix(line));
  if (is_of_nccl_tests(printed)) return read_nccl_tests(printed, file, into);
  if (auto step = read_log(text, file, model)) {
    into.steps.push_back(std::move(*step));
    return;
  }
  const CsvTable table = table_of(lines, file);
  if (table.has("m") && table.has("n") && table.has("k")) return read_products(table, file, into);
  if (table.has("seconds")) return read_steps(table, file, model, into);
  refuse(
      "--from {}: line 1: is nothing that is known: nccl-tests' output, a CSV of products (columns m, n, k), "
      "a CSV of "
      "steps (a column seconds), a log of Megatron, torchtitan or nanotron",
      file);
}

}  // namespace echelon
