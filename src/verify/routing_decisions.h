// Compares the routing decisions of two runs. The mesh's decisions are recorded, and the one-rank run
// continues with them. If it would have decided otherwise, the two choices must be a tie up to rounding;
// everything after is then compared as if they had agreed.
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

// The decisions of one step: a number for each layer with experts, sample of the global batch, position, and
// index among the k choices. The number is the expert, plus the number of experts if the token was dropped
// there; negative if unknown.
class RoutingDecisions {
 public:
  explicit RoutingDecisions(const Plan& plan);

  const std::vector<std::int64_t>& layers() const { return layers_; }
  bool empty() const { return codes_.empty(); }
  // A token's k numbers.
  std::int32_t* at(std::int64_t layer, std::int64_t sample, std::int64_t position);
  const std::vector<std::int32_t>& codes() const { return codes_; }
  std::vector<std::int32_t>& codes() { return codes_; }

 private:
  std::vector<std::int64_t> layers_;
  std::int64_t samples_, positions_, k_;
  std::vector<std::int32_t> codes_;
};

// Records the decisions of one rank of the mesh.
class RoutingRecorder : public RoutingWatch {
 public:
  explicit RoutingRecorder(const Plan& plan) : plan_(plan) {}

  void on_choice(std::int64_t, const RoutedTokens&, const TokenRouter&, const Tensor&,
                 std::span<const double>, const Tensor&) override {}
  void on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids, const Tensor& weights,
               const Tensor& kept, const Keep& keep) override;

  struct Gathered {
    RoutingDecisions decisions;
    // By layer: the number of decisions on which the ranks that hold them disagree, or that no rank has made.
    std::map<std::int64_t, std::int64_t> disputed;
  };
  // Gathers the decisions of all ranks of the mesh (collective), and forgets the step.
  Gathered gather(const Rank& rank, std::int64_t step);

 private:
  Plan plan_;
  std::map<std::int64_t, RoutingDecisions> steps_;
};

// The differences between the runs in one layer.
struct RoutingDifference {
  std::int64_t step = 0, layer = 0;
  std::string kind;         // "choice" of experts, or "drop" at an expert's capacity
  std::int64_t tokens = 0;  // tokens with different choices, or with different drops
  // For the difference furthest from a tie: by how much the scores (for a drop, the weights) would have to
  // move for the one rank to decide like the mesh, and by how much rounding may move them.
  double shift = 0, allowed = 0;
  bool ties() const { return shift <= allowed; }
};

// Makes the one-rank run decide like the mesh, and notes where it would not have.
class RoutingJudge : public RoutingWatch {
 public:
  void impose(std::int64_t step, RoutingRecorder::Gathered gathered);
  void forget_before(std::int64_t step);
  // Maps the one rank's sample numbers to the mesh's; empty: the same.
  void of_samples(std::vector<std::int64_t> samples) { samples_ = std::move(samples); }
  // In a trial, decisions are made under rounding noise, and the scores are compared with those without
  // noise.
  void begin_trial() { is_trial_ = true; }
  void end_trial() { is_trial_ = false; }
  // Between these, a rank of another precision follows the mesh's decisions; what it would have decided
  // itself does not count as a difference.
  void begin_wide() { is_wide_ = true; }
  void end_wide() { is_wide_ = false; }

  bool has_differences(std::int64_t first_step, std::int64_t last_step) const;
  // After the trials. What rounding may do is `factor` times the trials' root mean square.
  std::vector<RoutingDifference> differences(std::int64_t step, double factor) const;

  void on_choice(std::int64_t layer, const RoutedTokens& tokens, const TokenRouter& router,
                 const Tensor& logits, std::span<const double> bias, const Tensor& ids) override;
  void on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids, const Tensor& weights,
               const Tensor& kept, const Keep& keep) override;

 private:
  // A decision that the one rank would have made differently.
  struct Flip {
    double shift = 0;
    std::int64_t count = 1;
    std::vector<std::size_t> places;  // indices of the numbers that the decision depends on
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
  // `positions`: of the tokens, on the host.
  Place place(std::int64_t layer, const RoutedTokens& tokens, const std::vector<std::int32_t>& positions,
              std::int64_t row, std::int64_t rows) const;
  // The mesh's decisions for a token, or nullptr.
  const std::int32_t* mesh_codes(const Place& place);

  std::map<std::int64_t, RoutingRecorder::Gathered> steps_;
  std::vector<std::int64_t> samples_;
  std::map<Place, Flip> choices_, drops_;  // by token; drops: by the first token of a microbatch
  bool is_trial_ = false, is_wide_ = false;
};

}  // namespace echelon
