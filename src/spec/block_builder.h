// How a family writes its blocks down: each call adds an op behind those before it and returns the value that
// it makes for the next one.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "spec/block.h"
#include "spec/model_spec.h"

namespace echelon {

class BlockBuilder {
 public:
  explicit BlockBuilder(const ModelSpec& model) : m_(model) {}

  int input(const std::string& name);  // the residual stream
  // `weight` (rows of a table, cut over tp, or whole on every rank).
  int embedding(ParamSpec table, double scale = 1);
  int positions(int x, ParamSpec table, std::int64_t first = 0);
  // The same of each row's next token, by a table that the model's embedding declares.
  int next_embedding(ParamSpec table, double scale);
  // Behind a product by rows, or an embedding, norms are of the sum over the ranks. With a weight and a bias,
  // a weight alone, or neither.
  int layer_norm(const std::string& name, int x, const std::string& parameter,
                 NormKind kind = NormKind::layer);
  // With a weight, or without.
  int rms_norm(const std::string& name, int x, const std::string& parameter, NormKind kind = NormKind::rms);
  // Each head of x on its own: `heads[i]` of them with weights[i], one behind the other, or, of a weight that
  // is cut, with equal parts of it, or all without. What lies behind them in x stays as it is.
  int head_norm(const std::string& name, int x, std::vector<ParamSpec> weights,
                std::vector<std::int64_t> heads);
  // By columns where the weights are cut along what they make, by rows where they are cut along what they
  // take. Several weights lie side by side.
  int columns(const std::string& name, int x, std::vector<ParamSpec> weights,
              std::vector<ParamSpec> biases = {});
  int rows(const std::string& name, int x, ParamSpec weight);
  int rope(int qkv, bool windowed = false);
  // `sinks`: one of each head, or none.
  int attention(int qkv, bool windowed = false, std::vector<ParamSpec> sinks = {});
  // By weights that every rank has whole, of its own rows.
  int compressed(const std::string& name, int x, std::vector<ParamSpec> weights);
  // [q | k | v] of normalised [queries | keys and values | the turned part of all heads' keys]. `queries`: a
  // value that has them already, and the first of the three is not there; or -1.
  int latent(int compressed, int queries, std::vector<ParamSpec> weights);
  int state_space(int mixed, std::vector<ParamSpec> weights, std::vector<ParamSpec> biases);
  int short_conv(int bcx, ParamSpec taps);
  // What weights side by side make, each times a number; where all are 1, x.
  int scale(const std::string& name, int x, const std::vector<ParamSpec>& made_by,
            const std::vector<double>& factors);
  int gate(int x, int g);
  int narrow(int attended);  // of each head what its value has
  int join(const std::string& name, int x, int y);
  // `parameters`: those of xielu.
  int activation(int x, Activation activation, std::vector<ParamSpec> parameters = {});
  int residual(const std::string& name, int x, int y, std::vector<ParamSpec> biases = {});
  int sum(const std::string& name, int x, double scale);
  // Of the router; then of each expert gate, up and down, or up and down; then of the one that all tokens
  // share, and what it is weighed by. Biases: of the router and of each expert, or none. `sent`: what goes to
  // the experts in place of x; or -1.
  int experts(int x, int sent, std::vector<ParamSpec> weights, std::vector<ParamSpec> biases = {});
  // `table` of the embedding, for a model where it is the output matrix too; `untied`: the name of another's.
  int loss(int x, ParamSpec table, const char* untied = "lm_head.weight");
  // Of the token behind each row's next one, by the output matrix of the loss before it, times `weight`.
  int next_loss(int x, double weight);

  BlockProgram finish(int output);

 private:
  int value(std::string name, Home home, std::int64_t width, Again again = Again::asked);
  BlockOp& add(OpKind kind, std::string name, std::vector<int> inputs, std::vector<int> outputs,
               std::vector<int> backward_reads);
  int whole(const std::string& name, int x);  // the sum over the ranks, where x is a part of it
  BlockOp& norm(const std::string& name, int x, std::int64_t statistics);
  BlockOp& product(OpKind kind, const std::string& name, int x, int y);
  std::int64_t width(int value) const { return program_.value(value).width; }

  const ModelSpec& m_;
  BlockProgram program_;
};

// Parameters. Names are those that transformers saves.
ParamSpec matrix(std::string name, std::int64_t rows, std::int64_t cols, int shard_dim,
                 std::vector<Piece> pieces, double std);
// (out, in) matrices cut by what they make, by what they take, or held whole by every tp rank, which
// multiplies its own rows of the sequence with it. `unit`: rows or columns that stay together (a head).
ParamSpec cut_rows(std::string name, std::int64_t rows, std::int64_t cols, std::int64_t unit, double std);
ParamSpec cut_columns(std::string name, std::int64_t rows, std::int64_t cols, std::int64_t unit, double std);
ParamSpec whole_matrix(std::string name, std::int64_t rows, std::int64_t cols, double std);
ParamSpec embedding_table(std::string name, const ModelSpec& model);
ParamSpec norm_weight(std::string name, std::int64_t width);
ParamSpec head_norm_weight(std::string name, std::int64_t head_dim);
// A number that every tp rank uses on columns of its own.
ParamSpec whole_number(std::string name, double begin);
// Of heads that are normalised together, and cut.
ParamSpec cut_norm_weight(std::string name, std::int64_t width, std::int64_t head_dim);
ParamSpec whole_bias(std::string name, std::int64_t width);  // added once, behind the sum over the group
ParamSpec cut_bias(std::string name, std::int64_t width,
                   std::vector<Piece> pieces);  // as the outputs are cut
// The same, whose units several tp ranks may have: each uses them for heads of its own.
ParamSpec repeated(ParamSpec cut);
// Residual outputs start smaller so that the variance of the residual stream does not grow with depth
// (GPT-2).
double residual_std(const ModelSpec& model);

}  // namespace echelon
