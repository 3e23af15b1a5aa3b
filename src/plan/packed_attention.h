// The effect of packed documents on attention: how many keys a token sees, and how much longer than the mean
// the ranks compute for which all others wait. Both are expected values over thousands of packed sequences
// and the batches that these form, whatever the size of one batch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "plan/workload.h"
#include "spec/context_layout.h"

namespace echelon {

struct PackedAttention {
  double keys = 0;       // that a token sees, on average
  double length = 0;     // of the document that a token is in, averaged over tokens
  double documents = 0;  // in a sequence, on average
  // Attention of the ranks for which all wait, over the mean: the data-parallel rank with most, and for each
  // of its microbatches the cp rank with most. With dynamic context parallelism: the busiest of all ranks.
  double busiest = 1;
  double in_group = 1;  // the factor that is due to imbalance within cp groups
  double largest = 1;   // attention of the largest of that rank's microbatches, over their mean
  // How many ranks compute a document together. Without dynamic context parallelism: one entry, with all cp
  // ranks.
  struct Degree {
    int ranks = 1;
    double share = 1;  // of all tokens
    double keys = 0;   // that one of these tokens sees, on average
  };
  std::vector<Degree> degrees;
};

class PackedDocuments {
 public:
  // The workload must outlive this, and must have documents.
  explicit PackedDocuments(const Workload& work);

  const PackedAttention& of(const Plan& c);
  // The fields of a plan that the result depends on.
  using Key = std::tuple<int, int, int, int, int, std::int64_t>;
  Key key(const Plan& c) const;
  std::int64_t num_sequences() const { return std::ssize(sequences_); }  // the number of sequences packed

 private:
  double pairs(const ContextLayout& layout, int ring_index, const DocumentStarts& starts) const;
  const std::vector<double>& rank_pairs(const Plan& c);
  // How long the data-parallel ranks wait for in the examined microbatches.
  struct Visits {
    struct Rank {
      double busy = 0, most = 0, visited = 0, microbatches = 0;
    };
    std::vector<std::vector<Rank>> batches;       // for each batch, its ranks
    double total = 0, mean = 0, all_visited = 0;  // mean: over all ranks
  };
  // Pipelines of any depth share these, and so do all cp if documents are cut separately.
  const Visits& visits(const Plan& c);
  PackedAttention fixed(const Plan& c);
  PackedAttention dynamic(const Plan& c) const;

  const Workload& work_;
  std::vector<DocumentStarts> sequences_;
  std::vector<std::uint32_t> drawn_;  // the sequence of each sample; repeats for later samples
  double windowed_, all_pairs_ = 0, mean_length_ = 0, mean_documents_ = 0;
  std::map<std::pair<int, int>, std::vector<double>> rank_pairs_;  // of each sequence, and ring index
  std::map<std::tuple<int, std::size_t, int, std::int64_t>, Visits> visits_;
  std::map<Key, PackedAttention> known_;
};

// How many ranks a document of `length` tokens needs if each takes at most `most_tokens`: a power of two.
int dynamic_degree(std::int64_t length, double most_tokens);

// Why documents of these lengths are not priced for this program; empty if they are.
std::string no_documents(const Workload& work);

}  // namespace echelon
