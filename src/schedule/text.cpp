#include "schedule/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/utf8.h"

namespace echelon {
namespace {

constexpr int largest_number = 999999;  // of a stage, microbatch, version or rank
constexpr std::string_view overlap_mark = "OVERLAP_F_B";

// The letter of each kind of message.
constexpr std::array<std::pair<char, ValueKind>, 6> letters{{{'A', ValueKind::activation},
                                                             {'G', ValueKind::gradient},
                                                             {'H', ValueKind::head_input},
                                                             {'D', ValueKind::head_gradient},
                                                             {'L', ValueKind::head_sums},
                                                             {'N', ValueKind::head_scale}}};

char letter_of(ValueKind kind) {
  for (const auto& [letter, carried] : letters)
    if (carried == kind) return letter;
  throw InvariantError("a message without a letter");
}

std::optional<ValueKind> kind_of(std::string_view op) {
  for (const auto& [letter, kind] : letters)
    if (op == std::string_view(&letter, 1)) return kind;
  return std::nullopt;
}

// One row, read from left to right.
class Row {
 public:
  Row(std::string_view text, bool csv, const std::string& where, int line, std::size_t rank)
      : text_(text), csv_(csv), where_(where), line_(line), rank_(rank) {}

  std::vector<Instruction> read() {
    while (next_token()) {
      at_ = 0;
      if (token_ == ".") continue;
      if (peek() == '(')
        read_pair();
      else
        out_.push_back(read_instruction());
      if (at_ != token_.size()) refuse_token("something follows the instruction");
    }
    return std::move(out_);
  }

 private:
  static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

  // A non-empty cell of the CSV, or a word of our form; parentheses keep a word together.
  bool next_token() {
    const auto ends = [&](char c) { return csv_ ? c == ',' : is_blank(c); };
    while (begin_ < text_.size()) {
      std::size_t end = begin_;
      for (bool inside = false; end < text_.size() && (inside || !ends(text_[end])); ++end) {
        if (text_[end] == '(') inside = true;
        if (text_[end] == ')') inside = false;
      }
      token_ = text_.substr(begin_, end - begin_);
      begin_ = end + 1;
      while (!token_.empty() && is_blank(token_.front())) token_.remove_prefix(1);
      while (!token_.empty() && is_blank(token_.back())) token_.remove_suffix(1);
      if (!token_.empty()) return true;
    }
    return false;
  }

  char peek() const { return at_ < token_.size() ? token_[at_] : '\0'; }
  void skip_blanks() {
    while (is_blank(peek())) ++at_;
  }

  int read_number(const char* of) {
    const std::size_t first = at_;
    int value = 0;
    for (; peek() >= '0' && peek() <= '9'; ++at_) {
      value = value * 10 + (peek() - '0');
      if (value > largest_number)
        refuse_token(fmt::format("the {} is too large, above {}", of, largest_number));
    }
    if (at_ == first) refuse_token(fmt::format("the {} is missing", of));
    return value;
  }

  std::string_view read_letters() {
    const std::size_t first = at_;
    while (peek() >= 'A' && peek() <= 'Z') ++at_;
    return token_.substr(first, at_ - first);
  }

  Instruction read_instruction() {
    Instruction i;
    i.stage = read_number("stage");
    const std::string_view op = read_letters();
    if (csv_ && (op == "F" || op == "I" || op == "W" || op == "B")) {
      i.op = op == "F" ? Op::F : op == "I" ? Op::B : op == "W" ? Op::W : Op::BW;
      i.microbatch = read_number("microbatch");
    } else if (!csv_ && (op == "V" || op == "VW")) {
      i.op = op == "V" ? Op::V : Op::VW;
      i.microbatch = read_number("microbatch");
    } else if (!csv_ && (op == "F" || op == "B" || op == "W" || op == "BW")) {
      i.op = op == "F" ? Op::F : op == "B" ? Op::B : op == "W" ? Op::W : Op::BW;
      i.microbatch = read_number("microbatch");
      if (peek() == '@') i.version = read_version();
    } else if (!csv_ && op == "S") {
      i.op = Op::step;
      if (peek() != '@') refuse_token("the version of the weights that the step makes is missing");
      i.version = read_version();
    } else if (const auto kind = kind_of(op); kind && !csv_) {
      i.carries = *kind;
      i.microbatch = read_number("microbatch");
      if (peek() != '<' && peek() != '>') refuse_token("a message is sent (>) or received (<)");
      i.op = token_[at_++] == '>' ? Op::send : Op::recv;
      i.peer = read_number("rank of the message");
    } else {
      refuse_token(op.empty() ? "the operation is missing" : fmt::format("there is no operation {}", op));
    }
    return i;
  }

  int read_version() {
    ++at_;
    return read_number("version");
  }

  void read_pair() {
    const std::size_t first = out_.size();
    do {
      ++at_;  // ( or ;
      skip_blanks();
      out_.push_back(read_instruction());
      if (out_.back().op == Op::step)
        refuse_token("only computations run together, with messages between them");
      out_.back().overlaps_next = true;
      skip_blanks();
    } while (peek() == ';');
    if (peek() != ')') refuse_token("the ) is missing");
    ++at_;
    if (!is_compute(out_[first].op) || !is_compute(out_.back().op))
      refuse_token("what runs together begins and ends with a computation");
    out_.back().overlaps_next = false;
    if (csv_ && token_.substr(at_).starts_with(overlap_mark)) at_ += overlap_mark.size();
  }

  [[noreturn]] void refuse_token(const std::string& why) const {
    std::string shown;
    for (char c : token_.substr(0, 40)) shown += c >= ' ' && c <= '~' ? c : '?';
    if (token_.size() > 40) shown += "...";
    refuse(
        "{}, line {} (rank {}): {}: {}; legal: {}", where_, line_, rank_, shown, why,
        csv_
            ? "[stage][F, I, W or B][microbatch], e.g. 0F3, and (0F3;7B1)OVERLAP_F_B"
            : "[stage][F, B, W or BW][microbatch], e.g. 0BW3, (0F3;7BW1), [stage]S@[version] of an optimizer "
              "step, and [part][V or VW][microbatch] of the output layer");
  }

  std::string_view text_;
  bool csv_;
  const std::string& where_;
  int line_;
  std::size_t rank_;
  std::size_t begin_ = 0;   // of what is left of the row
  std::string_view token_;  // being read
  std::size_t at_ = 0;      // in the token
  std::vector<Instruction> out_;
};

using Out = std::back_insert_iterator<std::string>;

void write_instruction(Out out, const Instruction& i, bool csv) {
  if (csv) {
    const char op = i.op == Op::F ? 'F' : i.op == Op::B ? 'I' : i.op == Op::W ? 'W' : 'B';
    fmt::format_to(out, "{}{}{}", i.stage, op, i.microbatch);
    return;
  }
  if (is_compute(i.op)) {
    fmt::format_to(out, "{}{}{}", i.stage, op_name(i.op), i.microbatch);
    if (i.version != 0) fmt::format_to(out, "@{}", i.version);
  } else if (i.op == Op::step) {
    fmt::format_to(out, "{}S@{}", i.stage, i.version);
  } else {
    fmt::format_to(out, "{}{}{}{}{}", i.stage, letter_of(i.carries), i.microbatch,
                   i.op == Op::send ? '>' : '<', i.peer);
  }
}

std::string write(const Schedule& schedule, bool csv) {
  std::string text;
  const Out out(text);
  bool has_comma = false;
  for (const auto& list : schedule.ranks) {
    bool inside = false;
    for (std::size_t k = 0; k < list.size(); ++k) {
      if (k > 0) text += inside ? ';' : csv ? ',' : ' ';
      has_comma = has_comma || (csv && k > 0 && !inside);
      const bool more = list[k].overlaps_next && k + 1 < list.size();
      if (more && !inside) text += '(';
      write_instruction(out, list[k], csv);
      if (inside && !more) {
        text += ')';
        if (csv) text += overlap_mark;
      }
      inside = more;
    }
    if (list.empty()) text += csv ? "," : ".";
    has_comma = has_comma || (csv && list.empty());
    text += '\n';
  }
  if (csv && !has_comma && !text.empty()) text.insert(text.find('\n'), ",");  // one column: still a CSV
  return text;
}

}  // namespace

Schedule from_text(std::string_view text, const std::string& where) {
  text = without_byte_order_mark(text);
  Schedule schedule;
  schedule.name = where;
  std::vector<std::pair<int, std::string_view>> rows;
  bool csv = false;
  for (int line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view row = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    row = row.substr(0, row.find('#'));
    csv = csv || row.find(',') != row.npos || row.find(overlap_mark) != row.npos;
    if (row.find_first_not_of(" \t\r") != row.npos) rows.emplace_back(line, row);
  }
  for (const auto& [line, row] : rows)
    schedule.ranks.push_back(Row(row, csv, where, line, schedule.ranks.size()).read());
  bool any = false;
  for (const auto& list : schedule.ranks)
    for (const Instruction& i : list) {
      any = true;
      const bool of_head =
          is_of_head(i.op) || (!is_compute(i.op) && i.op != Op::step && is_of_head(i.carries));
      int& places = of_head ? schedule.vocabulary_parts : schedule.num_stages;
      places = std::max(places, i.stage + 1);
      if (i.op != Op::step) schedule.num_microbatches = std::max(schedule.num_microbatches, i.microbatch + 1);
    }
  if (!any)
    refuse("{}: holds no instruction; legal: one row per rank of [stage][op][microbatch], e.g. 0F0 0BW0",
           where);
  return schedule;
}

std::string to_text(const Schedule& schedule) { return write(schedule, false); }

std::string to_csv(const Schedule& schedule) {
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
    for (const Instruction& i : schedule.ranks[r])
      if (!is_compute(i.op) || i.version != 0 || is_of_head(i.op))
        refuse("schedule {}: rank {}: {} cannot be said in torch's CSV, which has no {}; use the text form",
               schedule.name, r, to_string(i),
               is_of_head(i.op)   ? "parts of the output layer"
               : is_compute(i.op) ? "weight versions"
               : i.op == Op::step ? "optimizer steps"
                                  : "messages of this kind");
  return write(schedule, true);
}

}  // namespace echelon
