// What the routers of two runs decided, side by side: the mesh's decisions are recorded, and one rank goes on
// with them. Where it would have decided otherwise, the two choices must tie: what decides between them is
// then rounding, and everything behind is compared as if they had agreed.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "comm/rank.h"
#include "parallel/routing_watch.h"
#include "spec/plan.h"

namespace echelon {

// Of one step: for each layer that has experts, sample of the global batch, position and place among the k
// choices a number: the expert, plus their number where the token was dropped there; below zero where nobody
// has said.
class RoutingDecisions {
 public:
  explicit RoutingDecisions(const Plan& plan);

  const std::vector<std::int64_t>& layers() const { return layers_; }
  bool empty() const { return codes_.empty(); }
  // The k numbers of a token.
  std::int32_t* at(std::int64_t layer, std::int64_t sample, std::int64_t position);
  const std::vector<std::int32_t>& codes() const { return codes_; }
  std::vector<std::int32_t>& codes() { return codes_; }

 private:
  std::vector<std::int64_t> layers_;
  std::int64_t samples_, positions_, k_;
  std::vector<std::int32_t> codes_;
};

// A rank of the mesh writes down what its routers decide.
class RoutingRecorder : public RoutingWatch {
 public:
  explicit RoutingRecorder(const Plan& plan) : plan_(plan) {}

  void on_choice(std::int64_t, const RoutedTokens&, const TokenRouter&, const Tensor&,
                 std::span<const double>, const Tensor&) override {}
  void on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids, const Tensor& weights,
               const Tensor& kept, const Keep& keep) override;

  struct Gathered {
    RoutingDecisions decisions;
    // By layer: places of the decisions on which the ranks that hold them do not agree, or that no rank has
    // made.
    std::map<std::int64_t, std::int64_t> disputed;
  };
  // Of all ranks of the mesh, which call this together; the step is forgotten here.
  Gathered gather(const Rank& rank, std::int64_t step);

 private:
  Plan plan_;
  std::map<std::int64_t, RoutingDecisions> steps_;
};

// Where the runs differ in a layer.
struct RoutingDifference {
  std::int64_t step = 0, layer = 0;
  std::string kind;         // "choice" of experts, or "drop" at an expert's capacity
  std::int64_t tokens = 0;  // choices of tokens, or places where one was dropped
  // Of the one that is furthest from a tie: by how much the scores (of a drop: the weights) would have to
  // move for one rank to decide as the mesh did, and by how much rounding may move them.
  double shift = 0, allowed = 0;
  bool ties() const { return shift <= allowed; }
};

// One rank decides as the mesh did.
class RoutingJudge : public RoutingWatch {
 public:
  void impose(std::int64_t step, RoutingRecorder::Gathered gathered);
  void forget_before(std::int64_t step);
  // What the samples that one rank counts from 0 are to the mesh; empty: the same.
  void of_samples(std::vector<std::int64_t> samples) { samples_ = std::move(samples); }
  // Between these the decisions are made under rounding noise, and what they are made by is compared with
  // what it was without.
  void begin_trial() { is_trial_ = true; }
  void end_trial() { is_trial_ = false; }
  // Between these a rank of another precision decides: as the mesh did, and what it would have decided itself
  // is no difference of theirs.
  void begin_wide() { is_wide_ = true; }
  void end_wide() { is_wide_ = false; }

  bool has_differences(std::int64_t first_step, std::int64_t last_step) const;
  // After the trials: what rounding may do is `factor` times their root mean square.
  std::vector<RoutingDifference> differences(std::int64_t step, double factor) const;

  void on_choice(std::int64_t layer, const RoutedTokens& tokens, const TokenRouter& router,
                 const Tensor& logits, std::span<const double> bias, const Tensor& ids) override;
  void on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids, const Tensor& weights,
               const Tensor& kept, const Keep& keep) override;

 private:
  // A decision that one rank would have made otherwise.
  struct Flip {
    double shift = 0;
    std::int64_t count = 1;
    std::vector<std::size_t> places;  // of the numbers that the decision was made by
    std::vector<double> numbers, squares;
    bool is_imposed() const { return std::isfinite(shift); }
    int trials = 0;
    void add_trial(const std::vector<double>& moved);
    double allowed(double factor) const;
  };
  struct Place {
    std::int64_t step, layer, sample, position;
    auto operator<=>(const Place&) const = default;
  };
  // `positions`: those of the tokens, on the host.
  Place place(std::int64_t layer, const RoutedTokens& tokens, const std::vector<std::int32_t>& positions,
              std::int64_t row, std::int64_t rows) const;
  // The mesh's decisions on a token, or nullptr.
  const std::int32_t* mesh_codes(const Place& place);

  std::map<std::int64_t, RoutingRecorder::Gathered> steps_;
  std::vector<std::int64_t> samples_;
  std::map<Place, Flip> choices_, drops_;  // of tokens, and of microbatches by their first token
  bool is_trial_ = false, is_wide_ = false;
};

}  // namespace echelon
