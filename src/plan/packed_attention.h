// What packed documents make of attention: how many keys a token sees, and how much more than the mean the
// ranks compute that all others wait for. Both are expected, over thousands of packed sequences and the
// batches that these make, whatever the size of one batch.
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
  double length = 0;     // of the document that a token is in, on average
  double documents = 0;  // in a sequence
  // Attention of the ranks that all wait for, over the mean: the data-parallel rank with most, and of each of
  // its microbatches the cp rank with most. With dynamic context parallelism the busiest of all ranks.
  double busiest = 1;
  double in_group = 1;  // the part of it that lies in the cp groups
  double largest = 1;   // attention of the largest of that rank's microbatches, over their mean
  // How many ranks compute documents together. Without dynamic context parallelism one entry, of all cp
  // ranks.
  struct Degree {
    int ranks = 1;
    double share = 1;  // of all tokens
    double keys = 0;   // that one of these tokens sees
  };
  std::vector<Degree> degrees;
};

class PackedDocuments {
 public:
  // The workload outlives this, and has documents.
  explicit PackedDocuments(const Workload& work);

  const PackedAttention& of(const Plan& c);
  // What of a plan it depends on.
  using Key = std::tuple<int, int, int, int, int, std::int64_t>;
  Key key(const Plan& c) const;
  std::int64_t num_sequences() const { return std::ssize(sequences_); }  // that were packed

 private:
  double pairs(const ContextLayout& layout, int ring_index, const DocumentStarts& starts) const;
  const std::vector<double>& rank_pairs(const Plan& c);
  // What the data-parallel ranks wait for in the microbatches that are looked at.
  struct Visits {
    struct Rank {
      double busy = 0, most = 0, visited = 0, microbatches = 0;
    };
    std::vector<std::vector<Rank>> batches;       // each with its ranks
    double total = 0, mean = 0, all_visited = 0;  // mean: of all ranks
  };
  // Pipelines of any depth have the same, and so has any cp where documents are cut by themselves.
  const Visits& visits(const Plan& c);
  PackedAttention fixed(const Plan& c);
  PackedAttention dynamic(const Plan& c) const;

  const Workload& work_;
  std::vector<DocumentStarts> sequences_;
  std::vector<std::uint32_t>
      drawn_;  // of each of a step's samples its sequence; of later ones the same again
  double windowed_, all_pairs_ = 0, mean_length_ = 0, mean_documents_ = 0;
  std::map<std::pair<int, int>, std::vector<double>> rank_pairs_;  // of each sequence, of each ring index
  std::map<std::tuple<int, std::size_t, int, std::int64_t>, Visits> visits_;
  std::map<Key, PackedAttention> known_;
};

// Ranks that a document of `length` tokens needs where each takes at most `most_tokens`: a power of two.
int dynamic_degree(std::int64_t length, double most_tokens);

// Why documents of these lengths are not priced for this program; empty where they are.
std::string no_documents(const Workload& work);

}  // namespace echelon
