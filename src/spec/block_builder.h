// How a family builds its blocks: each call appends an op and returns the value that it produces.
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
  // Looks tokens up in `table`, which is cut over tp by vocabulary or whole on every rank; multiplies by
  // `scale`.
  int embedding(ParamSpec table, double scale = 1);
  int positions(int x, ParamSpec table, std::int64_t first = 0);
  // The same for each row's next token, with a table that the model's embedding block declares.
  int next_embedding(ParamSpec table, double scale);
  // Norms. After a row-parallel product or an embedding, x is summed over the tp ranks first.
  // With a weight and a bias, a weight alone, or neither, as `kind` says.
  int layer_norm(const std::string& name, int x, const std::string& parameter,
                 NormKind kind = NormKind::layer);
  // With a weight or without.
  int rms_norm(const std::string& name, int x, const std::string& parameter, NormKind kind = NormKind::rms);
  // Normalises each head of x by itself: the first heads[0] heads with weights[0], the next heads[1] with
  // weights[1], and so on, or all without weights. A weight that is cut has an equal part for each head.
  // Columns of x after these heads stay as they are.
  int head_norm(const std::string& name, int x, std::vector<ParamSpec> weights,
                std::vector<std::int64_t> heads);
  // Column-parallel and row-parallel products. Several weights stand side by side, as one matrix.
  int columns(const std::string& name, int x, std::vector<ParamSpec> weights,
              std::vector<ParamSpec> biases = {});
  int rows(const std::string& name, int x, ParamSpec weight);
  int rope(int qkv, bool windowed = false);
  // `sinks`: one parameter with a number for each head, or none.
  int attention(int qkv, bool windowed = false, std::vector<ParamSpec> sinks = {});
  // A product with weights that every tp rank holds whole, on its own rows of the sequence.
  int compressed(const std::string& name, int x, std::vector<ParamSpec> weights);
  // Latent attention's second products: [q | k | v] from the normalised [queries | keys and values | rotary
  // keys that all heads share]. `queries`: a value that is the queries already, in which case the first of
  // the three is absent; or -1.
  int latent(int compressed, int queries, std::vector<ParamSpec> weights);
  int state_space(int mixed, std::vector<ParamSpec> weights, std::vector<ParamSpec> biases);
  int short_conv(int bcx, ParamSpec taps);
  // Multiplies the columns that each weight in `made_by` produced by its factor. Returns x if all factors are
  // 1.
  int scale(const std::string& name, int x, const std::vector<ParamSpec>& made_by,
            const std::vector<double>& factors);
  int gate(int x, int g);
  int narrow(int attended);  // keeps of each head the columns that its value has
  int join(const std::string& name, int x, int y);
  // `parameters`: xielu's two.
  int activation(int x, Activation activation, std::vector<ParamSpec> parameters = {});
  int residual(const std::string& name, int x, int y, std::vector<ParamSpec> biases = {});
  int sum(const std::string& name, int x, double scale);
  // `weights`: the router; then gate, up and down of each expert, or up and down; then those of the shared
  // expert, and its gate's vector. `biases`: of the router and of each expert, or none. `sent`: the value
  // that goes to the experts in place of x, or -1.
  int experts(int x, int sent, std::vector<ParamSpec> weights, std::vector<ParamSpec> biases = {});
  // Output layer and loss. `table`: the embedding's, which is also the output matrix of a model with tied
  // embeddings. `untied`: the output matrix's name in other models; its bias is named after it in all.
  int loss(int x, ParamSpec table, const char* untied = "lm_head.weight");
  // Loss of the token after each row's next one, through the same output matrix, times `weight` (multi-token
  // prediction).
  int next_loss(int x, double weight);

  BlockProgram finish(int output);

 private:
  int value(std::string name, Home home, std::int64_t width, Again again = Again::asked);
  BlockOp& add(OpKind kind, std::string name, std::vector<int> inputs, std::vector<int> outputs,
               std::vector<int> backward_reads);
  int whole(const std::string& name, int x);  // sums x over the tp ranks if it is a partial sum
  BlockOp& norm(const std::string& name, int x, std::int64_t statistics);
  BlockOp& product(OpKind kind, const std::string& name, int x, int y);
  std::int64_t width(int value) const { return program_.value(value).width; }

  const ModelSpec& m_;
  BlockProgram program_;
};

// Parameters, with the names under which transformers saves them.
ParamSpec matrix(std::string name, std::int64_t rows, std::int64_t cols, int shard_dim,
                 std::vector<Piece> pieces, double std);
// (out, in) matrices: column-parallel (rows are cut), row-parallel (columns are cut), or whole on every tp
// rank, which multiplies its own rows of the sequence. `unit`: rows or columns that stay together, as those
// of a head.
ParamSpec cut_rows(std::string name, std::int64_t rows, std::int64_t cols, std::int64_t unit, double std);
ParamSpec cut_columns(std::string name, std::int64_t rows, std::int64_t cols, std::int64_t unit, double std);
ParamSpec whole_matrix(std::string name, std::int64_t rows, std::int64_t cols, double std);
ParamSpec embedding_table(std::string name, const ModelSpec& model);
ParamSpec norm_weight(std::string name, std::int64_t width);
ParamSpec head_norm_weight(std::string name, std::int64_t head_dim);
// A scalar that every tp rank uses on its own columns.
ParamSpec whole_number(std::string name, double begin);
// The weight of a norm over all heads together, cut over tp by heads.
ParamSpec cut_norm_weight(std::string name, std::int64_t width, std::int64_t head_dim);
ParamSpec whole_bias(std::string name, std::int64_t width);  // added once, after the sum over the group
// cut as the product's outputs are
ParamSpec cut_bias(std::string name, std::int64_t width,
                   std::vector<Piece> pieces);  // as the outputs are cut
// The same parameter with repeated units: where tp exceeds their number, several ranks hold one
// (Piece::repeats).
ParamSpec repeated(ParamSpec cut);
// Standard deviation of the matrices that write to the residual stream: smaller, so that its variance does
// not grow with depth (GPT-2).
double residual_std(const ModelSpec& model);

}  // namespace echelon
