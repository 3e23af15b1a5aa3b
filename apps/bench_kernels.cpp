// `bench kernels`: the matrix products and the attention of a model's training step, one by one, beside the
// speed of a large product in the same run, and which kernel computes each. Products are m x n x k, of layers
// y = x W and of their gradients dx and dW; attention is sequences x tokens, heads x their width.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "apps/bench.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/units.h"
#include "parallel/heads.h"
#include "parallel/vocabulary_logits.h"
#include "spec/block.h"
#include "spec/model_spec.h"
#include "spec/plan.h"
#include "tensor/kernels.h"
#include "tensor/prepare_kernels.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

struct BenchKernelsFlags {
  std::string model = "gpt2-124m", precision = "f32";
  std::int64_t seq_len = 1024, micro_batch = 4;
  int threads = available_cores(), repeats = 5;
  bool json = false;
};

// What a step computes `count` times. prepare() makes the operands and returns what computes it once.
struct Work {
  std::string name, shape, kernel = {};
  double flops = 0;
  std::int64_t count = 1;
  std::function<std::function<void()>()> prepare;
};

class StepWork {
 public:
  StepWork(const ModelSpec& model, const BenchKernelsFlags& f, const PrecisionRecipe& precision)
      : model_(model), flags_(f), precision_(precision), tokens_(f.seq_len * f.micro_batch) {
    for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
      for (const BlockOp& op : layer_program(model, layer).ops) {
        if (op.kind == OpKind::linear) add_linear(op);
        if (op.kind == OpKind::attention && !model.latent_attention()) add_attention();
        constexpr OpKind others[] = {OpKind::experts_in, OpKind::experts_out, OpKind::state_space,
                                     OpKind::short_conv};
        if (std::ranges::find(others, op.kind) != std::end(others) ||
            (op.kind == OpKind::attention && model.latent_attention()))
          left_out_.insert(op.name);
      }
    add_output();
  }

  const std::vector<Work>& all() const { return all_; }
  const std::set<std::string>& left_out() const { return left_out_; }  // ops of layers

 private:
  Tensor tensor(DType dtype, std::int64_t rows, std::int64_t cols) {
    const std::int64_t stride = cols == model_.vocab ? logits_row_stride(cols) : cols;
    const Tensor t(arena_, MemoryCategory::other, dtype, {rows, stride});
    fill_with_normals(*kernels_, t);
    return t.column_range(0, cols);
  }

  void add(Work work) {
    for (Work& known : all_)
      if (known.name == work.name && known.shape == work.shape) {
        known.count += work.count;
        return;
      }
    all_.push_back(std::move(work));
  }

  void add_linear(const BlockOp& op) {
    const std::size_t in = op.order == WeightOrder::out_in ? 1 : 0;
    std::int64_t out = 0;
    for (const ParamSpec& weight : op.weights) out += weight.shape[1 - in];
    const WeightShape w{op.name, op.weights.front().shape[in], out, op.order};
    add_forward(w, tokens_, precision_.activations, 1);
    add_gradients(w, tokens_, 1);
  }

  // A chunk of tokens at a time, whose logits are made in pieces if they are wider than their gradients.
  void add_output() {
    const ParamSpec output = output_matrix(model_);
    const WeightShape w{"output", output.shape[1], output.shape[0], WeightOrder::out_in};
    const DType wide = precision_.statistics, narrow = precision_.activations;
    const std::int64_t chunk = std::min(logits_chunk_rows(Device::cpu, element_bytes(narrow)), tokens_),
                       chunks = (tokens_ + chunk - 1) / chunk,
                       piece = wide == narrow ? chunk : wide_logits_rows(chunk);
    add_forward(w, piece, wide, chunks);
    if (chunk > piece) add_forward(w, chunk - piece, wide, chunks);
    add_gradients(w, chunk, chunks);
  }

  struct WeightShape {
    std::string name;
    std::int64_t in, out;
    WeightOrder order;
    bool out_in() const { return order == WeightOrder::out_in; }
  };
  // y = x W
  void add_forward(const WeightShape& w, std::int64_t rows, DType result, std::int64_t count) {
    add_product(w.name + " forward",
                {Transpose::no, w.out_in() ? Transpose::yes : Transpose::no, rows, w.out, w.in,
                 precision_.activations, result},
                count, precision_.parameters);
  }
  // Of x and of W.
  void add_gradients(const WeightShape& w, std::int64_t rows, std::int64_t count) {
    const DType narrow = precision_.activations;
    add_product(
        w.name + " dx",
        {Transpose::no, w.out_in() ? Transpose::no : Transpose::yes, rows, w.in, w.out, narrow, narrow},
        count, precision_.parameters);
    add_product(w.name + " dW",
                {Transpose::yes, Transpose::no, w.out_in() ? w.out : w.in, w.out_in() ? w.in : w.out, rows,
                 narrow, precision_.gradients},
                count, narrow);
  }

  void add_product(const std::string& name, const ProductShape& s, std::int64_t count, DType second) {
    const bool adds = s.ta == Transpose::yes;  // gradients of weights add up over microbatches
    const char* const kernel = cpu_product(s, flags_.threads);
    add({.name = name,
         .shape = fmt::format("{} x {} x {}", s.m, s.n, s.k),
         .kernel = kernel != nullptr ? kernel : products_by(precision_),
         .flops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k),
         .count = count,
         .prepare = [this, s, second, adds] {
           const auto operand = [&](DType type, Transpose turn, std::int64_t rows, std::int64_t cols) {
             return turn == Transpose::yes ? tensor(type, cols, rows) : tensor(type, rows, cols);
           };
           const Tensor a = operand(s.factors, s.ta, s.m, s.k), b = operand(second, s.tb, s.k, s.n),
                        c = tensor(s.result, s.m, s.n);
           return [this, s, a, b, c, adds] { kernels_->matmul(a, s.ta, b, s.tb, c, adds); };
         }});
  }

  void add_attention() {
    const ModelSpec& m = model_;
    const std::int64_t width = m.num_heads * m.head_dim, kv_width = m.num_kv_heads * m.head_dim;
    const AttentionShape s = Heads(m).shape(flags_.micro_batch, flags_.seq_len, flags_.seq_len);
    // Causal: a query sees half of the keys.
    const double flops =
        2.0 * static_cast<double>(flags_.seq_len) * static_cast<double>(tokens_) * static_cast<double>(width);
    const std::string shape = fmt::format("{} x {}, {} x {}", s.batch, s.q_len, s.num_heads, s.head_dim);
    const auto prepare = [this, s, width, kv_width](bool backward) {
      const DType type = precision_.activations;
      const Tensor q = tensor(type, tokens_, width), k = tensor(type, tokens_, kv_width),
                   v = tensor(type, tokens_, kv_width), out = tensor(type, tokens_, width),
                   lse = tensor(precision_.statistics, s.num_heads, tokens_).flat();
      const std::function<void()> forward = [=, this] { kernels_->attention(q, k, v, s, out, lse); };
      if (!backward) return forward;
      forward();
      const Tensor dout = tensor(type, tokens_, width), dq = tensor(type, tokens_, width),
                   dk = tensor(type, tokens_, kv_width), dv = tensor(type, tokens_, kv_width),
                   delta = tensor(precision_.statistics, s.num_heads, tokens_).flat();
      return std::function<void()>([=, this] {
        kernels_->attention_delta(out, dout, s, delta);
        kernels_->attention_backward(q, k, v, dout, lse, delta, s, dq, dk, dv);
      });
    };
    add({.name = "attention forward", .shape = shape, .flops = flops, .prepare = [=] {
           return prepare(false);
         }});
    add({.name = "attention backward", .shape = shape, .flops = 2.5 * flops, .prepare = [=] {
           return prepare(true);
         }});
  }

  const ModelSpec& model_;
  const BenchKernelsFlags& flags_;
  const PrecisionRecipe& precision_;
  const std::int64_t tokens_;
  Arena arena_;
  std::unique_ptr<Kernels> kernels_ = make_kernels(arena_, precision_, flags_.threads);
  std::vector<Work> all_;
  std::set<std::string> left_out_;
};

int bench_kernels(const BenchKernelsFlags& f) {
  for (const auto& [flag, value] : {std::pair{"--seq-len", f.seq_len},
                                    {"--micro-batch", f.micro_batch},
                                    {"--repeats", std::int64_t{f.repeats}}})
    if (value < 1 || value > most_repeats) refuse("{} {}: must be from 1 to {}", flag, value, most_repeats);
  if (f.threads < 1 || f.threads > most_bench_ranks)
    refuse("--threads {}: must be from 1 to {}", f.threads, most_bench_ranks);
  const ModelSpec model = load_model(f.model);
  if (f.precision != "f32" && f.precision != "bf16")
    refuse("--precision {}: no products of its own on a CPU; legal: f32, bf16", f.precision);
  const PrecisionRecipe& precision = recipe(f.precision);
  prepare_kernels(precision);
  std::optional<ProgressLine> line(std::in_place, "bench kernels", f.json);
  StepWork step(model, f, precision);
  std::vector<double> peaks, medians;
  for (const Work& work : step.all()) {
    report(line->progress(), static_cast<double>(medians.size()) / static_cast<double>(step.all().size()),
           work.name);
    const std::function<void()> run = work.prepare();
    run();
    std::vector<double> seconds;
    for (int repeat = 0; repeat < f.repeats; ++repeat) {
      const auto begin = Clock::now();
      run();
      seconds.push_back(seconds_since(begin));
    }
    medians.push_back(spread_of(seconds).median);
    peaks.push_back(measure_matmul_flops(precision, 1, f.threads, 2048));
  }
  line.reset();
  const double peak = spread_of(peaks).most;
  std::FILE* out = f.json ? stderr : stdout;
  fmt::print(out, "{}\n{} {}, {} x {}, {}; medians of {}\n", cpu_name(), model.name, precision.name,
             f.micro_batch, counted(f.seq_len, "token"), counted(f.threads, "thread"), f.repeats);
  fmt::print(out, "2048^3: {:.1f} GFLOP/s by {} (best of {}, measured in between)\n\n", peak / 1e9,
             products_by(precision), peaks.size());
  fmt::print(out, "{:22} {:>20} {:>5} {:>7} {:>8} {:>7}  {}\n", "", "", "times", "each", "GFLOP/s", "of peak",
             "by");
  ordered_json rows = ordered_json::array();
  double seconds = 0, flops = 0;
  for (std::size_t i = 0; i < medians.size(); ++i) {
    const Work& work = step.all()[i];
    const double rate = work.flops / medians[i];
    fmt::print(out, "{:22} {:>20} {:>5} {:>7} {:>8.1f} {:>6.1f}%{}\n", work.name, work.shape, work.count,
               format_seconds(medians[i]), rate / 1e9, 100 * rate / peak,
               work.kernel.empty() ? "" : "  " + work.kernel);
    seconds += static_cast<double>(work.count) * medians[i];
    flops += static_cast<double>(work.count) * work.flops;
    rows.push_back({{"name", work.name},
                    {"shape", work.shape},
                    {"count", work.count},
                    {"seconds", medians[i]},
                    {"flops", rate},
                    {"share_of_peak", rate / peak},
                    {"by", work.kernel.empty() ? ordered_json(nullptr) : ordered_json(work.kernel)}});
  }
  fmt::print(out, "\nall of a step: {}, {:.1f}% of the peak\n", format_seconds(seconds),
             100 * flops / seconds / peak);
  if (!step.left_out().empty())
    fmt::print(out, "left out, though they multiply: {}\n", fmt::join(step.left_out(), ", "));
  if (f.json)
    fmt::print("{}\n", json_text(ordered_json{{"cpu", cpu_name()},
                                              {"matmul_flops", peak},
                                              {"step_seconds", seconds},
                                              {"share_of_peak", flops / seconds / peak},
                                              {"rows", rows}}));
  return 0;
}

}  // namespace

void add_bench_kernels(CLI::App& bench, int& status) {
  auto flags = std::make_shared<BenchKernelsFlags>();
  CLI::App& app = *bench.add_subcommand(
      "kernels", "Products and attention of a model's step: speed, and what computes each");
  heading(app, common_flags);
  app.add_option("--model", flags->model, "Preset, TOML file, or directory with a config.json")
      ->type_name("MODEL")
      ->capture_default_str();
  app.add_option("--precision", flags->precision, "What is computed in")
      ->type_name("f32|bf16")
      ->capture_default_str();
  add_number(app, "--seq-len", flags->seq_len, "Tokens in a sequence");
  add_number(app, "--micro-batch", flags->micro_batch, "Sequences at once");
  add_number(app, "--threads", flags->threads, "Compute threads");
  add_number(app, "--repeats", flags->repeats, "How often to measure each");
  app.add_flag("--json", flags->json, "One JSON object on standard output");
  app.callback([flags, &status] { status = bench_kernels(*flags); });
}

}  // namespace echelon
