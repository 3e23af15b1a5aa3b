// Predicted against published.
#pragma once

#include <string>
#include <vector>

#include "published/tables.h"

namespace echelon::published {

struct Prediction {
  double seconds = 0, low = 0, high = 0;
  double memory_bytes = 0;
  bool fits = false;
};

Prediction predict(const Point& point);

struct Score {
  std::size_t rows = 0;
  double mean_error = 0, median_error = 0, p90_error = 0, bias = 0;  // of predicted / published - 1
  double inside = 0;                                                 // part of the rows in their interval
};
// Among the rows that have a time: those fitted on, or the others.
Score score(const Table& table, const std::vector<Prediction>& predictions, bool fitted);

// Over groups of at least five rows.
struct Choice {
  std::size_t groups = 0;
  double correlation = 0;  // median: Spearman's
  // How much slower than the best measured one the predicted best is, over the groups.
  double median_regret = 0, mean_regret = 0, p90_regret = 0, worst_regret = 0;
};
Choice choice(const Table& table, const std::vector<Prediction>& predictions);

// One group of them: which row is predicted to be the fastest, and which was.
struct GroupChoice {
  std::string group;
  std::size_t chosen = 0, best = 0;  // rows of the table
  double correlation = 0, regret = 0;
};
std::vector<GroupChoice> choices(const Table& table, const std::vector<Prediction>& predictions);

// Whether runs fit the memory, by prediction and by what happened: those that ended with a time did.
struct Fitting {
  int ran = 0, rejected = 0;   // of these
  int failed = 0, missed = 0;  // out of memory; predicted to fit
};
Fitting fitting(const Table& table, const std::vector<Prediction>& predictions);

// What docs/planning.md prints of a table: a line for the rows fitted on, one for the others, one for its
// groups, one for its memory.
std::vector<std::string> score_lines(const Table& table, const std::vector<Prediction>& predictions);

}  // namespace echelon::published
