// `bench context`: the attention of one layer, alone and cut over ranks by every kind of context parallelism,
// beside the speed of matrix products in the same run; and a drawing of the ring's steps as they ran.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "apps/bench.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/median.h"
#include "base/philox.h"
#include "base/units.h"
#include "comm/threads.h"
#include "parallel/context_parallel.h"
#include "tensor/host.h"
#include "tensor/prepare_kernels.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

struct BenchContextFlags {
  int ranks = 2;
  std::int64_t seq_len = 4096, heads = 8, kv_heads = 8, head_dim = 64;
  int repeats = 5;
  bool json = false;
};

struct Way {
  std::string name;
  int ranks = 1, threads = 1;
  ContextKind kind = ContextKind::ring;
  ContextBalance balance = ContextBalance::zigzag;
};

struct Measured {
  std::vector<double> forward, backward;          // seconds, by repeat; on rank 0, between barriers
  std::vector<std::vector<double>> rank_seconds;  // for which each rank computed, by repeat
  std::vector<std::vector<WorkSpan>> spans;       // of the last repeat, by rank
  std::int64_t bytes_sent = 0;                    // by rank 0, forward and backward

  double seconds() const { return median(forward) + median(backward); }
  // Load over average for the rank that computed longest, median over repeats.
  double imbalance() const {
    std::vector<double> ratios;
    for (const auto& ranks : rank_seconds)
      ratios.push_back(*std::max_element(ranks.begin(), ranks.end()) * static_cast<double>(ranks.size()) /
                       std::accumulate(ranks.begin(), ranks.end(), 0.0));
    return median(ratios);
  }
};

Plan plan_of(const BenchContextFlags& f, const Way& way) {
  Plan plan;
  plan.model = load_model("llama-tiny");
  plan.model.name = "attention";
  plan.model.num_heads = f.heads;
  plan.model.num_kv_heads = f.kv_heads;
  plan.model.head_dim = f.head_dim;
  plan.model.max_seq = f.seq_len;
  plan.seq_len = f.seq_len;
  plan.mesh.set(Axis::cp, way.ranks);
  plan.context_kind = way.kind;
  plan.context_balance = way.balance;
  return plan;
}

// One more run of the layer's attention, forward and backward.
void run_once(const BenchContextFlags& f, const Way& way, Measured& measured) {
  const Plan plan = plan_of(f, way);
  prepare_kernels(plan.precision);
  ThreadWorld world(way.ranks, std::chrono::seconds(300));
  measured.rank_seconds.emplace_back(static_cast<std::size_t>(way.ranks));
  measured.spans.assign(static_cast<std::size_t>(way.ranks), {});
  const auto epoch = world.time().now();
  run_ranks(world, [&](int index) {
    TraceRecorder recorder(world.time(), epoch, 1);
    Arena arena;
    const auto kernels = make_kernels(arena, DType::f32, way.threads);
    const Rank rank(world, plan.mesh, index, DType::f32, arena, *kernels, Collectives::direct, 0, &recorder);
    const Heads heads(f.heads, f.kv_heads, f.head_dim);
    const ContextParallel context(rank, plan, heads);
    const std::int64_t rows = plan.tokens_here();
    const auto random = [&](std::int64_t cols, std::uint64_t which) {
      const Tensor t = rank.activation({rows, cols});
      const Philox numbers(1, Stream::test, which * 1000 + static_cast<std::uint64_t>(index));
      std::vector<double> values(static_cast<std::size_t>(t.numel()));
      numbers.fill_normal(0, values.size(), values.data());
      copy_numbers_from_host(values, t);
      return t;
    };
    const Sequences sequences{1, {}};
    const Tensor dout = random(heads.width(), 1), dqkv = rank.activation({rows, heads.qkv_width()});
    const Tensor out = rank.activation({rows, heads.width()}), lse = rank.activation({rows * f.heads});
    for (bool counts : {false, true}) {  // the first is a warm-up
      const Tensor qkv = random(heads.qkv_width(), 2);
      recorder.begin_step(1);
      const std::int64_t sent = rank.traffic().bytes(Axis::cp);
      rank.along(Axis::cp).barrier().wait();
      const auto begin = Clock::now();
      const Tensor core = context.enter(sequences, qkv);
      context.forward(sequences, core, {}, out, lse);
      rank.along(Axis::cp).barrier().wait();
      const double forward = seconds_since(begin);
      Tensor delta = context.delta(sequences, out, dout);
      context.backward(sequences, core, {}, SequenceSums(nullptr, *kernels, 0, 1, rows), dout, lse,
                       std::move(delta), dqkv);
      rank.along(Axis::cp).barrier().wait();
      if (!counts) continue;
      double computed = 0;
      std::vector<WorkSpan> spans = recorder.trace().work;
      for (const WorkSpan& span : spans)
        if (!is_beside(span.activity)) computed += 1e-9 * static_cast<double>(span.end - span.begin);
      const auto place = static_cast<std::size_t>(index);
      measured.rank_seconds.back()[place] = computed;
      measured.spans[place] = std::move(spans);
      if (index > 0) continue;
      measured.forward.push_back(forward);
      measured.backward.push_back(seconds_since(begin) - forward);
      measured.bytes_sent = rank.traffic().bytes(Axis::cp) - sent;
    }
  });
}

std::vector<Way> ways(const BenchContextFlags& f) {
  std::vector<Way> all{{"one rank, 1 thread", 1, 1}};
  if (f.ranks == 1) return all;
  all.push_back({fmt::format("one rank, {} threads", f.ranks), 1, f.ranks});
  for (ContextBalance balance : {ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none})
    all.push_back({fmt::format("ring, {}", name_of(balance)), f.ranks, 1, ContextKind::ring, balance});
  all.push_back({"allgather, zigzag", f.ranks, 1, ContextKind::allgather});
  if (f.heads % f.ranks == 0 && (f.kv_heads % f.ranks == 0 || f.ranks % f.kv_heads == 0))
    all.push_back({"ulysses", f.ranks, 1, ContextKind::ulysses});
  return all;
}

// Two lines for each rank: whose keys and values it computed with, and whose were on their way to it; a
// column for each equal part of the time from the first block of the forward pass to the last of the backward
// pass.
std::string drawing(const Measured& measured) {
  constexpr int columns = 96;
  constexpr const char* names = "0123456789abcdefghijklmnopqrstuvwxyz";
  TraceTime begin = std::numeric_limits<TraceTime>::max(), end = std::numeric_limits<TraceTime>::min();
  for (const auto& spans : measured.spans)
    for (const WorkSpan& span : spans) begin = std::min(begin, span.begin), end = std::max(end, span.end);
  std::string text;
  for (std::size_t rank = 0; rank < measured.spans.size(); ++rank) {
    std::string computing(columns, '.'), arriving(columns, ' ');
    for (int column = 0; column < columns; ++column) {
      const auto now = begin + (end - begin) * (2 * column + 1) / (2 * columns);
      for (const WorkSpan& span : measured.spans[rank])
        if (span.begin <= now && now < span.end)
          (is_beside(span.activity) ? arriving : computing)[static_cast<std::size_t>(column)] =
              names[span.which % 36];
    }
    text += fmt::format("rank {:<3} {}\n         {}\n", rank, computing, arriving);
  }
  return text;
}

int bench_context(const BenchContextFlags& f) {
  for (const auto& [flag, value] : {std::pair{"--seq-len", f.seq_len},
                                    {"--heads", f.heads},
                                    {"--kv-heads", f.kv_heads},
                                    {"--head-dim", f.head_dim},
                                    {"--repeats", std::int64_t{f.repeats}}})
    if (value < 1 || value > most_repeats) refuse("{} {}: must be from 1 to {}", flag, value, most_repeats);
  if (f.ranks < 1 || f.ranks > most_bench_ranks)
    refuse("--ranks {}: must be from 1 to {}", f.ranks, most_bench_ranks);
  if (f.heads % f.kv_heads != 0) refuse("--kv-heads {}: must divide the {} --heads", f.kv_heads, f.heads);
  if (f.seq_len % (2 * f.ranks) != 0)
    refuse("--seq-len {}: must be a multiple of {}, twice the --ranks", f.seq_len, 2 * f.ranks);
  const std::vector<Way> all = ways(f);
  std::vector<Measured> measured(all.size());
  std::vector<double> peaks;
  std::optional<ProgressLine> line(std::in_place, "bench context", f.json);
  for (int repeat = 0; repeat < f.repeats; ++repeat) {  // ways take turns, so that noise affects all alike
    peaks.push_back(measure_matmul_flops(DType::f32, 1, 1));
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double done = repeat + static_cast<double>(i) / static_cast<double>(all.size());
      report(line->progress(), done / f.repeats, all[i].name);
      run_once(f, all[i], measured[i]);
    }
  }
  line.reset();
  const double peak = *std::max_element(peaks.begin(), peaks.end());
  const double forward_flops =
      2 * static_cast<double>(f.seq_len) * static_cast<double>(f.seq_len * f.heads * f.head_dim);
  std::FILE* out = f.json ? stderr : stdout;
  fmt::print(out, "{}\nT {}, {} heads of {}, {} key/value heads, causal, f32; medians of {}\n", cpu_name(),
             f.seq_len, f.heads, f.head_dim, f.kv_heads, f.repeats);
  fmt::print(out, "matrix products, 1 thread: {:.1f} GFLOP/s\n\n", peak / 1e9);
  fmt::print(out, "{:22} {:>10} {:>10} {:>10} {:>14} {:>18} {:>12}\n", "", "forward", "backward", "GFLOP/s",
             "of the peak", "slowest/mean work", "sent");
  ordered_json rows = ordered_json::array();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Measured& m = measured[i];
    const double rate = 3.5 * forward_flops / m.seconds();
    const double share = rate / peak / std::max(all[i].ranks, all[i].threads);
    fmt::print(out, "{:22} {:>10} {:>10} {:>10.1f} {:>13.1f}% {:>18} {:>12}\n", all[i].name,
               format_seconds(median(m.forward)), format_seconds(median(m.backward)), rate / 1e9, 100 * share,
               m.imbalance() > 0 ? fmt::format("{:.2f}", m.imbalance()) : "",
               m.bytes_sent > 0 ? format_bytes(static_cast<double>(m.bytes_sent)) : "");
    rows.push_back({{"name", all[i].name},
                    {"ranks", all[i].ranks},
                    {"threads", all[i].threads},
                    {"forward_seconds", median(m.forward)},
                    {"backward_seconds", median(m.backward)},
                    {"flops", rate},
                    {"share_of_peak", share},
                    {"imbalance", m.imbalance() > 0 ? ordered_json(m.imbalance()) : ordered_json(nullptr)},
                    {"bytes_sent", m.bytes_sent}});
  }
  if (f.ranks > 1) {
    fmt::print(out, "\nring, zigzag over one rank with {} threads: {:.1f}%\n", f.ranks,
               100 * measured[1].seconds() / measured[2].seconds());
    fmt::print(
        out,
        "\nThe ring as it ran in the last repeat (zigzag): whose keys a rank computes with, and below whose "
        "are\non their way to it.\n{}",
        drawing(measured[2]));
  }
  if (f.json)
    fmt::print("{}\n", json_text(ordered_json{{"cpu", cpu_name()}, {"matmul_flops", peak}, {"rows", rows}}));
  return 0;
}

}  // namespace

void add_bench_context(CLI::App& bench, int& status) {
  auto flags = std::make_shared<BenchContextFlags>();
  CLI::App& app =
      *bench.add_subcommand("context", "Attention, alone and cut over ranks: speed, balance, the ring drawn");
  heading(app, common_flags);
  add_number(app, "--ranks", flags->ranks, "Thread ranks of one thread each");
  add_number(app, "--seq-len", flags->seq_len, "Tokens in the sequence");
  add_number(app, "--heads", flags->heads, "Query heads");
  add_number(app, "--kv-heads", flags->kv_heads, "Key/value heads");
  add_number(app, "--head-dim", flags->head_dim, "Elements per head");
  add_number(app, "--repeats", flags->repeats, "How often to measure each, in turns");
  app.add_flag("--json", flags->json, "One JSON object on standard output");
  app.callback([flags, &status] { status = bench_context(*flags); });
}

}  // namespace echelon
