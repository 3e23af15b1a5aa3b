#include "train/log_formats.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/json_text.h"

namespace echelon {
namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

struct Scalar {
  const char* tag;  // to TensorBoard, which shows those of one folder together
  const char* column;
  double value;
};

std::int64_t step_of(const LogEntry& entry) {
  return std::visit(Overloaded{[](const WorkSpread& spread) { return spread.last_step; },
                               [](const Corruption& corruption) { return corruption.found_after; },
                               [](const auto& other) { return other.step; }},
                    entry);
}

double largest_imbalance(const std::vector<ExpertLoad>& loads) {
  double largest = 0;
  for (const ExpertLoad& load : loads) largest = std::max(largest, load.imbalance);
  return largest;
}

double mean_drop_rate(const std::vector<ExpertLoad>& loads) {
  double sum = 0;
  for (const ExpertLoad& load : loads) sum += load.drop_rate;
  return sum / static_cast<double>(loads.size());
}

// The order is that of the columns.
std::vector<Scalar> scalars_of(const LogEntry& entry) {
  return std::visit(
      Overloaded{
          [](const StepRecord& r) {
            std::vector<Scalar> all{{"train/loss", "loss", r.loss},
                                    {"train/grad_norm", "grad_norm", r.grad_norm},
                                    {"train/lr", "lr", r.lr},
                                    {"speed/tokens", "tokens", static_cast<double>(r.tokens)},
                                    {"speed/tokens_per_second", "tokens_per_second", r.tokens_per_second},
                                    {"speed/mfu", "mfu", r.mfu},
                                    {"speed/step_seconds", "step_seconds", r.step_seconds}};
            if (r.experts.empty()) return all;
            all.push_back({"experts/imbalance", "expert_imbalance", largest_imbalance(r.experts)});
            all.push_back({"experts/drop_rate", "expert_drop_rate", mean_drop_rate(r.experts)});
            return all;
          },
          [](const Evaluation& e) {
            return std::vector<Scalar>{{"validation/loss", "validation_loss", e.validation_loss}};
          },
          [](const WorkSpread& s) {
            const auto slowest = static_cast<std::size_t>(s.slowest());
            return std::vector<Scalar>{{"ranks/slowest", "slowest_rank", static_cast<double>(slowest)},
                                       {"ranks/slowest_seconds", "slowest_seconds", s.seconds[slowest]}};
          },
          [](const auto&) { return std::vector<Scalar>{}; }},
      entry);
}

constexpr const char* columns[] = {"loss",
                                   "grad_norm",
                                   "lr",
                                   "tokens",
                                   "tokens_per_second",
                                   "mfu",
                                   "step_seconds",
                                   "expert_imbalance",
                                   "expert_drop_rate",
                                   "validation_loss",
                                   "slowest_rank",
                                   "slowest_seconds"};

// A text that may hold commas, as why a step was skipped.
std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

// ---- protocol buffers, as far as they are needed here

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
  return text;
}

std::string varint(std::uint64_t value) {
  std::string text;
  for (; value >= 0x80; value >>= 7) text += static_cast<char>((value & 0x7f) | 0x80);
  return text + static_cast<char>(value);
}

// A field's number and wire type, then its value.
std::string int_field(int number, std::int64_t value) {
  return varint(static_cast<std::uint64_t>(number) << 3) + varint(static_cast<std::uint64_t>(value));
}
std::string double_field(int number, double value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 1) +
         little_endian(std::bit_cast<std::uint64_t>(value), 8);
}
std::string bytes_field(int number, const std::string& value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 2) + varint(value.size()) + value;
}
std::string float_field(int number, float value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 5) +
         little_endian(std::bit_cast<std::uint32_t>(value), 4);
}

// A CRC among the bytes that it is of would be one that says little, so it is turned and moved.
std::string masked_crc(const std::string& bytes) {
  return little_endian(std::rotr(crc32c(bytes), 15) + 0xa282ead8u, 4);
}

std::string tf_record(const std::string& data) {
  const std::string length = little_endian(data.size(), 8);
  return length + masked_crc(length) + data + masked_crc(data);
}

std::string member_line(std::int64_t step, const char* name, const std::string& json) {
  return fmt::format("{{\"step\":{},\"{}\":{}}}", step, name, json);
}

}  // namespace

std::string json_line(const LogEntry& entry) {
  return std::visit(Overloaded{[](const Evaluation& e) { return evaluation_json(e.step, e.validation_loss); },
                               [](const Fingerprint& f) { return fingerprint_json(f.step, f.text); },
                               [](const RunBegin& b) { return member_line(b.step, "start", b.json); },
                               [](const RunEnd& e) { return member_line(e.step, "summary", e.json); },
                               [](const SavedCheckpoint& c) {
                                 return member_line(c.step, "checkpoint", json_text(nlohmann::ordered_json(c.path)));
                               },
                               [](const auto& other) { return to_json(other); }},
                    entry) +
         "\n";
}

std::string csv_header() {
  std::string header = "step";
  for (const char* column : columns) header += fmt::format(",{}", column);
  return header + ",skipped,fingerprint\n";
}

std::string csv_row(const LogEntry& entry) {
  if (std::holds_alternative<RunBegin>(entry) || std::holds_alternative<RunEnd>(entry) ||
      std::holds_alternative<SavedCheckpoint>(entry) || std::holds_alternative<Corruption>(entry))
    return "";
  std::string row = fmt::format("{}", step_of(entry));
  const std::vector<Scalar> scalars = scalars_of(entry);
  for (const std::string_view column : columns) {
    const auto found = std::find_if(scalars.begin(), scalars.end(),
                                    [&](const Scalar& scalar) { return scalar.column == column; });
    row += found == scalars.end() ? "," : fmt::format(",{}", found->value);
  }
  const auto* const record = std::get_if<StepRecord>(&entry);
  const auto* const fingerprint = std::get_if<Fingerprint>(&entry);
  return row + fmt::format(",{},{}\n", record != nullptr ? csv_text(record->skipped) : "",
                           fingerprint != nullptr ? fingerprint->text : "");
}

std::string tensorboard_beginning(std::int64_t first_step, double wall_seconds) {
  // Event: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7; SessionLog: status = 1,
  // START = 1.
  return tf_record(double_field(1, wall_seconds) + bytes_field(3, "brain.Event:2")) +
         tf_record(double_field(1, wall_seconds) + int_field(2, first_step) +
                   bytes_field(7, int_field(1, 1)));
}

std::string tensorboard_event(const LogEntry& entry, double wall_seconds) {
  std::string summary;  // value = 1; Summary.Value: tag = 1, simple_value = 2
  for (const Scalar& scalar : scalars_of(entry))
    summary += bytes_field(1, bytes_field(1, scalar.tag) + float_field(2, static_cast<float>(scalar.value)));
  if (summary.empty()) return "";
  return tf_record(double_field(1, wall_seconds) + int_field(2, step_of(entry)) + bytes_field(5, summary));
}

}  // namespace echelon
