#include "apps/simulate_packing.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "apps/flag_values.h"
#include "apps/help.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "base/real.h"
#include "base/units.h"
#include "plan/packed_attention.h"
#include "spec/context_layout.h"
#include "spec/packed_documents.h"

namespace echelon {
namespace {

const std::vector<std::string> packing_flags{"--seq-len", "--sequences", "--cp"};

// Pairs of the busiest ring index over the mean, by sequence.
struct Imbalance {
  double mean = 0, worst = 0;
};

Imbalance imbalance_of(const ContextLayout& layout, const std::vector<DocumentStarts>& sequences) {
  Imbalance found;
  double all = 0, waited = 0;
  for (const DocumentStarts& starts : sequences) {
    std::int64_t most = 0, sum = 0;
    for (int r = 0; r < layout.ring(); ++r) {
      const std::int64_t pairs = layout.document_pairs(r, starts);
      most = std::max(most, pairs);
      sum += pairs;
    }
    const double waited_here = real(most) * layout.ring();
    waited += waited_here, all += real(sum);
    found.worst = std::max(found.worst, waited_here / real(sum));
  }
  found.mean = waited / all;
  return found;
}

}  // namespace

void PackingFlags::add_to(CLI::App& app) {
  app_ = &app;
  heading(app, "Packed documents (with --document-lengths)");
  app.add_option(
         "--document-lengths", lengths_,
         "Pack documents of the lengths in this file, and say how evenly the ranks of a cp group share "
         "out their attention")
      ->type_name("FILE");
  add_number(app, "--seq-len", seq_len_, "Tokens in a sequence");
  add_number(app, "--sequences", sequences_, "Sequences that are packed");
  add_number(app, "--cp", cp_, "Context-parallel ranks");
}

void PackingFlags::refuse_strangers() const {
  for (const CLI::Option* option : app_->get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name == "--document-lengths" || name == "--help") continue;
    if (is_asked() && !contains(packing_flags, name) && name != "--json")
      refuse("{}: is of another simulation, and --document-lengths packs documents; drop one", name);
    if (!is_asked() && contains(packing_flags, name))
      refuse("{}: is of packed documents; add --document-lengths FILE", name);
  }
}

void PackingFlags::print(bool json) const {
  constexpr std::int64_t most_tokens = 1'000'000'000, most_sequences = 100'000;
  constexpr int most_ranks = 4096;
  constexpr double most_documents = 1e7;
  if (cp_ < 1 || cp_ > most_ranks) refuse("--cp {}: must be from 1 to {}", cp_, most_ranks);
  if (sequences_ < 1 || sequences_ > most_sequences)
    refuse("--sequences {}: must be from 1 to {}", sequences_, most_sequences);
  if (seq_len_ < 1 || seq_len_ % (2 * cp_) != 0 || seq_len_ > most_tokens / sequences_)
    refuse("--seq-len {}: must be a multiple of {} (2 x --cp), and at most {} with {}", seq_len_, 2 * cp_,
           most_tokens / sequences_, counted(sequences_, "sequence"));
  const DocumentLengths lengths =
      read_document_lengths(read_text(lengths_, "--document-lengths"), "--document-lengths " + lengths_);
  if (const double expected = real(sequences_) * (1 + real(seq_len_) / lengths.mean());
      expected > most_documents)
    refuse(
        "--seq-len {}: {} of it are packed of about {:.1g} documents; must be at most {:.0g}, by fewer "
        "--sequences or a smaller --seq-len",
        seq_len_, counted(sequences_, "sequence"), expected, most_documents);
  const std::vector<DocumentStarts> sequences = pack_documents(lengths, seq_len_, sequences_);
  Plan plan;
  plan.mesh.set(Axis::cp, cp_);
  plan.seq_len = seq_len_;
  double documents = 0, pairs = 0;
  std::map<int, double> tokens;  // by the number of ranks that a document needs
  for (const DocumentStarts& starts : sequences) {
    documents += real(std::ssize(starts));
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const std::int64_t length = (i + 1 < starts.size() ? starts[i + 1] : seq_len_) - starts[i];
      pairs += real(length) * real(length + 1) / 2;
      tokens[std::min(cp_, dynamic_degree(length, real(seq_len_) / cp_))] += real(length);
    }
  }
  const double all = real(seq_len_ * sequences_), keys = pairs / all;
  nlohmann::ordered_json object{{"cp", cp_},
                                {"seq_len", seq_len_},
                                {"sequences", sequences_},
                                {"mean_tokens", lengths.mean()},
                                {"per_sequence", documents / real(sequences_)},
                                {"keys", keys}};
  std::string table = fmt::format("{:<10} {:>6} {:>6}\n", "cp-balance", "mean", "worst");
  for (ContextBalance balance : {ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none}) {
    plan.context_balance = balance;
    const Imbalance found = imbalance_of(ContextLayout(plan), sequences);
    table += fmt::format("{:<10} {:>6.2f} {:>6.2f}\n", name_of(balance), found.mean, found.worst);
    object["busiest_over_mean"][name_of(balance)] = {{"mean", found.mean}, {"worst", found.worst}};
  }
  std::string needed;
  // Dynamic context parallelism requires powers of two.
  if ((cp_ & (cp_ - 1)) == 0) {
    object["share_of_tokens"] = nlohmann::ordered_json::array();
    for (const auto& [ranks, count] : tokens) {
      needed += fmt::format("{} {:.1f}% on {}", needed.empty() ? "" : ",", 100 * count / all,
                            counted(ranks, "rank"));
      object["share_of_tokens"].push_back({{"ranks", ranks}, {"share", count / all}});
    }
    needed = fmt::format("if each document is on as many ranks as it needs, at most {} on each:{}\n",
                         counted(seq_len_ / cp_, "token"), needed);
  }
  if (json) {
    fmt::print("{}\n", json_text(object));
    return;
  }
  fmt::print(
      "{} of {}, packed of {:.1f} documents of {:.0f} tokens on average; a token sees {:.0f} keys, of {} "
      "without the mask\nattention of the rank with most over the mean of {}, and in the sequence where it "
      "is worst:\n{}{}",
      counted(sequences_, "sequence"), counted(seq_len_, "token"), documents / real(sequences_),
      lengths.mean(), keys, (seq_len_ + 1) / 2, counted(cp_, "rank"), table, needed);
}

}  // namespace echelon
