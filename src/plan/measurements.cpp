#include "plan/measurements.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "base/edits.h"
#include "base/error.h"
#include "base/parse_number.h"
#include "base/units.h"
#include "base/utf8.h"
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

// RequestError if it is not a number above 0.
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
  const std::string lower = in_small_letters(text);
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

// The ranks of one communicator of a test. NCCL_TESTS_SPLIT creates several, which run at once.
struct NcclGroup {
  std::int64_t ranks = 0;
  std::set<std::string> hosts;
};

class NcclTests {
 public:
  NcclTests(const std::string& file, Measurements& into) : file_(file), into_(into) {}

  void read(const std::vector<std::string>& lines) {
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const std::vector<std::string> words = words_of(lines[i]);
      if (words.empty()) continue;
      if (words[0].starts_with("#"))
        read_comment(lines[i], words, i);
      else if (is_row(words))
        read_row(words, i);
    }
    if (num_rows_ == 0) refuse("--from {}: nccl-tests' output without a measurement", file_);
  }

 private:
  static constexpr const char* legal = "all_reduce, all_gather, reduce_scatter, alltoall";

  std::string place(std::size_t line) const { return FilePlace{file_, line + 1}.text(); }

  // A row starts with a size and a count; hosts also print dates and other lines in between.
  static bool is_row(const std::vector<std::string>& words) {
    const auto is_whole = [](const std::string& word) {
      return word.find_first_not_of("0123456789") == std::string::npos;
    };
    return is_whole(words[0]) && (words.size() == 1 || is_whole(words[1]));
  }

  void read_comment(const std::string& line, const std::vector<std::string>& words, std::size_t i) {
    const std::string starting = "Collective test starting:";
    if (const std::size_t at = line.find(starting); at != std::string::npos) {
      const std::vector<std::string> test = words_of(line.substr(at + starting.size()));
      const std::string name = test.empty() ? "" : test.front();
      verb_ = verb_in(name);
      if (!verb_) refuse("{}: {} is no test that is fitted; legal: {}", place(i), name, legal);
    }
    if (words.size() > 2 && words[1] == "Rank") read_rank(line, words);
    if (words.size() > 1 && words[1] == "size" &&
        std::find(words.begin(), words.end(), "time") != words.end())
      columns_.assign(words.begin() + 1, words.end());
  }

  // "#  Rank  0 Group  0 Pid  4711 on  node01 device  0 [0x07] NVIDIA A100"
  void read_rank(const std::string& line, const std::vector<std::string>& words) {
    const auto on = std::find(words.begin(), words.end(), "on"),
               group = std::find(words.begin(), words.end(), "Group");
    if (on == words.end() || on + 1 == words.end()) return;
    if (words[2] == "0") groups_.clear(), devices_.clear();  // of the next test in the file
    NcclGroup& own = groups_[group == words.end() ? "0" : group[1]];
    // A device that is named again belongs to another host of the same name, as containers may have.
    const std::size_t device = line.find(" device ");
    const int again = device == std::string::npos ? 0 : devices_[on[1] + line.substr(device)]++;
    own.hosts.insert(fmt::format("{} {}", on[1], again));
    ++own.ranks;
  }

  // One group's ranks and hosts; all groups must be alike.
  NcclGroup group(std::size_t line) const {
    const NcclGroup one = groups_.empty() ? NcclGroup{} : groups_.begin()->second;
    for (const auto& [name, other] : groups_)
      if (other.ranks != one.ranks || other.hosts.size() != one.hosts.size())
        refuse("{}: group {} has {} on {}, and group {} {} on {}; legal: groups that are alike", place(line),
               groups_.begin()->first, counted(one.ranks, "rank"), counted(std::ssize(one.hosts), "host"),
               name, counted(other.ranks, "rank"), counted(std::ssize(other.hosts), "host"));
    if (one.ranks < 2)
      refuse("{}: the ranks are not said before it: lines \"# Rank 0 ... on HOST ...\", two at least{}",
             place(line), one.ranks == 0 ? "" : " in a group");
    return one;
  }

  std::optional<std::size_t> column(const char* name) const {
    const auto at = std::find(columns_.begin(), columns_.end(), name);
    return at == columns_.end() ? std::optional<std::size_t>() : at - columns_.begin();
  }

  void read_row(const std::vector<std::string>& words, std::size_t line) {
    if (columns_.empty()) refuse("{}: a measurement before the line that names its columns", place(line));
    if (words.size() < columns_.size())
      refuse("{}: has {} of the {} that nccl-tests name", place(line), counted(std::ssize(words), "column"),
             columns_.size());
    if (!verb_) verb_ = verb_in(std::filesystem::path(file_).filename().string());
    if (!verb_)
      refuse("--from {}: does not say which collective this is; name the file so that it has one of {}",
             file_, legal);
    const NcclGroup ranks = group(line);
    const std::size_t time = *column("time");
    MeasuredCollective one;
    one.verb = *verb_;
    one.ranks = ranks.ranks;
    one.hosts = std::ssize(ranks.hosts);
    const FilePlace size{file_, line + 1, 1}, seconds{file_, line + 1, time + 1};
    one.bytes = parse_number<double>(size.text() + ": size", words[0]);
    one.seconds = 1e-6 * positive(words[time], seconds.text(), "time");
    one.where = fmt::format("{}, line {}", file_, line + 1);
    check_columns(words, one, line);
    ++num_rows_;
    if (one.bytes > 0) into_.collectives.push_back(one);
  }

  // Checks that the test's own columns fit this collective: whether it reduces, and the ratio of bus to
  // algorithm bandwidth (doc/PERFORMANCE.md of nccl-tests).
  void check_columns(const std::vector<std::string>& words, const MeasuredCollective& one,
                     std::size_t line) const {
    const bool reduces = one.verb == Verb::all_reduce || one.verb == Verb::reduce_scatter;
    const std::string name = one.verb == Verb::all_to_all ? "alltoall" : verb_name(one.verb);
    if (const auto op = column("redop"); op && (words[*op] == "none") == reduces)
      refuse("{}, column {}: redop {} is not that of {}, which this is taken for; name the file for its test",
             place(line), *op + 1, words[*op], name);
    const auto algorithm = column("algbw"), bus = column("busbw");
    if (!algorithm || !bus) return;
    const auto number = [&](std::size_t at) {
      return parse_number<double>(fmt::format("{}, column {}: {}", place(line), at + 1, columns_[at]),
                                  words[at]);
    };
    const double n = static_cast<double>(one.ranks),
                 factor = (one.verb == Verb::all_reduce ? 2 : 1) * (n - 1) / n, has = number(*bus),
                 expected = factor * number(*algorithm);
    constexpr double printed = 0.006;  // GB/s: two digits are printed
    if (std::abs(has - expected) > printed * (1 + factor) + 0.01 * expected)
      refuse(
          "{}, column {}: busbw {} is not {:.4g} times algbw {}, as of {} over {}; is this another test, or "
          "of other ranks?",
          place(line), *bus + 1, words[*bus], factor, words[*algorithm], name, counted(one.ranks, "rank"));
  }

  const std::string& file_;
  Measurements& into_;
  std::optional<Verb> verb_;
  std::map<std::string, NcclGroup> groups_;
  std::map<std::string, int> devices_;  // how often each was named
  std::vector<std::string> columns_;
  std::int64_t num_rows_ = 0;
};

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

// Rows with named columns.
struct CsvTable {
  std::vector<std::string> names;
  std::vector<std::map<std::string, TableCell>> rows;
  GivenFields remarks;
  bool has(const std::string& name) const {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
};

// In small or capital letters.
bool names_products(const std::vector<std::string>& names) {
  std::set<std::string> small;
  for (const std::string& name : names) small.insert(in_small_letters(name));
  return small.contains("m") && small.contains("n") && small.contains("k");
}

// Without rows if the first line names the columns of no known table.
CsvTable table_of(const std::vector<std::string>& lines, const std::string& file) {
  CsvTable table;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const FilePlace place{file, i + 1};
    if (read_remark(lines[i], place.text(), table.remarks)) continue;
    if (lines[i].find_first_not_of(" \t") == std::string::npos || lines[i][0] == '#') continue;
    std::vector<std::string> cells = cells_of(lines[i], place);
    if (table.names.empty()) {
      for (std::string& name : cells) std::replace(name.begin(), name.end(), '_', '-');
      table.names = cells;
      if (!table.has("seconds") && !names_products(cells)) break;
      for (std::size_t c = 0; c < cells.size(); ++c)
        if (std::count(cells.begin(), cells.begin() + static_cast<std::ptrdiff_t>(c), cells[c]) > 0)
          refuse("{}: two columns are named \"{}\"", FilePlace{file, i + 1, c + 1}.text(), cells[c]);
      continue;
    }
    if (cells.size() != table.names.size())
      refuse("{}: has {}, and the header {}", place.text(), counted(std::ssize(cells), "column"),
             table.names.size());
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
      refuse(
          "--from {}: column {} is not known; a table of products has m, n, k, one of {}, and perhaps batch "
          "and precision",
          file, name, fmt::join(units, ", "));
  const auto unit = std::find_if(units.begin(), units.end(), [&](const auto& one) { return table.has(one); });
  if (unit != units.end())
    if (const auto other =
            std::find_if(unit + 1, units.end(), [&](const auto& one) { return table.has(one); });
        other != units.end())
      refuse("--from {}: columns {} and {} both say how long a product took; give one", file, *unit, *other);
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

void read_measurements(const std::string& bytes, const std::string& file, const std::string& model,
                       Measurements& into) {
  const std::string text(without_byte_order_mark(bytes));
  const std::vector<std::string> lines = lines_of(text);
  std::vector<std::string> printed;
  for (const std::string& line : lines) printed.push_back(without_escapes(line));
  for (std::string& line : printed) line.erase(0, launcher_prefix(line));
  if (is_of_nccl_tests(printed)) return NcclTests(file, into).read(printed);
  if (auto step = read_log(text, file, model)) {
    into.steps.push_back(std::move(*step));
    return;
  }
  const CsvTable table = table_of(lines, file);
  if (names_products(table.names) && !(table.has("m") && table.has("n") && table.has("k")))
    refuse(
        "--from {}: has columns {}; a table of products names them m, n, k, one of seconds, ms, us, tflops, "
        "and perhaps batch and precision",
        file, fmt::join(table.names, ", "));
  if (table.has("m") && table.has("n") && table.has("k")) return read_products(table, file, into);
  if (table.has("seconds")) return read_steps(table, file, model, into);
  refuse(
      "--from {}: line 1: is nothing that is known: nccl-tests' output, a CSV of products (columns m, n, k), "
      "a CSV of "
      "steps (a column seconds), a log of Megatron, torchtitan or nanotron with the time of a step",
      file);
}

}  // namespace echelon
