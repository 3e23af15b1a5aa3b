#include "spec/block.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/split.h"
#include "spec/block_builder.h"
#include "spec/families.h"
#include "spec/fine_tuning.h"

namespace echelon {

std::vector<ParamSpec> BlockProgram::parameters() const {
  std::vector<ParamSpec> list;
  for (const BlockOp& op : ops) {
    if (!op.tied) list.insert(list.end(), op.weights.begin(), op.weights.end());
    list.insert(list.end(), op.biases.begin(), op.biases.end());
    for (const Adapter& adapter : op.adapters) list.insert(list.end(), {adapter.a, adapter.b});
  }
  return list;
}

// Nor numbers of its own, which no pass over a product has.
static bool has_no_gate(const BlockOp& op) {
  return op.kind == OpKind::activation && !is_gated(op.activation) && op.activation != Activation::xielu;
}

bool takes_product(const BlockOp& next, const BlockOp& product) {
  return product.kind == OpKind::linear && (has_no_gate(next) || next.kind == OpKind::residual) &&
         next.inputs.back() == product.outputs.front();
}

bool gives_input(const BlockOp& activation, const BlockOp& product) {
  return has_no_gate(activation) && product.kind == OpKind::linear &&
         activation.outputs.back() == product.inputs.front();
}

int BlockProgram::producer(int value) const {
  for (std::size_t i = 0; i < ops.size(); ++i)
    if (std::find(ops[i].outputs.begin(), ops[i].outputs.end(), value) != ops[i].outputs.end())
      return static_cast<int>(i);
  return -1;
}

Home BlockProgram::output_home() const {
  const Home home = value(output).home;
  return home == Home::partial_sum ? Home::residual : home;
}

const BlockOp* BlockProgram::find(OpKind kind) const {
  const auto found = std::find_if(ops.begin(), ops.end(), [&](const BlockOp& op) { return op.kind == kind; });
  return found == ops.end() ? nullptr : &*found;
}

static BlockProgram tuned(BlockProgram program, const ModelSpec& m) {
  tune(program, m);
  return program;
}

BlockProgram embedding_program(const ModelSpec& m) {
  return tuned(m.family == Family::gpt2   ? Gpt2::embedding(m)
               : m.family == Family::neox ? Neox::embedding(m)
                                          : Llama::embedding(m),
               m);
}

BlockProgram layer_program(const ModelSpec& m, std::int64_t layer) {
  return tuned(m.family == Family::gpt2   ? Gpt2::layer(m, layer)
               : m.family == Family::neox ? Neox::layer(m, layer)
                                          : Llama::layer(m, layer),
               m);
}

BlockProgram head_program(const ModelSpec& m) {
  return tuned(m.family == Family::gpt2   ? Gpt2::head(m)
               : m.family == Family::neox ? Neox::head(m)
                                          : Llama::head(m),
               m);
}

BlockProgram final_norm_program(const ModelSpec& model) {
  ModelSpec m = model;
  m.num_mtp_layers = 0;  // behind a whole output layer alone
  BlockProgram program = head_program(m);
  check(program.ops.back().kind == OpKind::loss, "a head ends in the output layer");
  program.output = program.ops.back().inputs.front();
  program.ops.pop_back();
  program.values.pop_back();
  return program;
}

void join_losses(BlockProgram& program) {
  for (BlockOp& next : program.ops) {
    if (next.kind != OpKind::loss || !next.next) continue;
    BlockOp& first = program.ops[static_cast<std::size_t>(program.producer(program.output))];
    check(first.kind == OpKind::loss && !first.next, "a head's output is the loss of the next tokens");
    next.inputs.push_back(first.inputs.front());
    next.wants.push_back(first.wants.front());
    next.backward_reads.push_back(first.inputs.front());
    first.backward_reads.clear();
    first.joined = true;
  }
}

int BlockBuilder::value(std::string name, Home home, std::int64_t width, Again again) {
  program_.values.push_back({std::move(name), home, width, again});
  return static_cast<int>(program_.values.size()) - 1;
}

BlockOp& BlockBuilder::add(OpKind kind, std::string name, std::vector<int> inputs, std::vector<int> outputs,
                           std::vector<int> backward_reads) {
  BlockOp op;
  op.kind = kind;
  op.name = std::move(name);
  op.inputs = std::move(inputs);
  op.outputs = std::move(outputs);
  op.backward_reads = std::move(backward_reads);
  for (int input : op.inputs) op.wants.push_back(program_.value(input).home);
  program_.ops.push_back(std::move(op));
  return program_.ops.back();
}

int BlockBuilder::input(const std::string& name) {
  return program_.input = value(name, Home::residual, m_.hidden);
}

int BlockBuilder::embedding(ParamSpec table, double scale) {
  const int x = value("embedded", Home::partial_sum, m_.hidden);
  BlockOp& op = add(OpKind::embedding, "embedding", {}, {x}, {});
  op.weights = {std::move(table)};
  op.scale = scale;
  return x;
}

int BlockBuilder::next_embedding(ParamSpec table, double scale) {
  const int x = embedding(std::move(table), scale);
  BlockOp& op = program_.ops.back();
  op.name = "next_embedding";
  op.next = op.tied = true;
  return x;
}

int BlockBuilder::positions(int x, ParamSpec table, std::int64_t first) {
  const int y = value("placed", Home::residual, m_.hidden);
  BlockOp& op = add(OpKind::positions, "positions", {x}, {y}, {});
  op.wants = {Home::residual};
  table.multiplies = false;
  op.weights = {std::move(table)};
  op.first_position = first;
  return y;
}

int BlockBuilder::whole(const std::string& name, int x) {
  return program_.value(x).home == Home::partial_sum ? sum(name + ".in", x, 1) : x;
}

BlockOp& BlockBuilder::norm(const std::string& name, int x, std::int64_t statistics) {
  const Home home = program_.value(x).home;
  const int y = value(name + ".out", home, width(x), Again::always),
            stats = value(name + ".stats", home, statistics);
  return add(OpKind::norm, name, {x}, {y, stats}, {x, stats});
}

int BlockBuilder::layer_norm(const std::string& name, int x, const std::string& parameter, NormKind kind) {
  x = whole(name, x);
  BlockOp& op = norm(name, x, 2);
  op.centered = true;
  if (kind != NormKind::layer_plain) op.weights = {norm_weight(parameter + ".weight", width(x))};
  if (kind == NormKind::layer) op.biases = {whole_bias(parameter + ".bias", width(x))};
  return op.outputs.front();
}

int BlockBuilder::rms_norm(const std::string& name, int x, const std::string& parameter, NormKind kind) {
  x = whole(name, x);
  BlockOp& op = norm(name, x, 1);
  if (kind == NormKind::rms) op.weights = {norm_weight(parameter + ".weight", width(x))};
  return op.outputs.front();
}

int BlockBuilder::head_norm(const std::string& name, int x, std::vector<ParamSpec> weights,
                            std::vector<std::int64_t> heads) {
  BlockOp& op = norm(name, x, sum_of(heads));
  op.weights = std::move(weights);
  op.heads = std::move(heads);
  return op.outputs.front();
}

// x enters the region that is cut.
BlockOp& BlockBuilder::product(OpKind kind, const std::string& name, int x, int y) {
  BlockOp& op = add(kind, name, {x}, {y}, {x});
  if (op.wants.front() == Home::residual) op.wants = {Home::whole};
  return op;
}

int BlockBuilder::columns(const std::string& name, int x, std::vector<ParamSpec> weights,
                          std::vector<ParamSpec> biases) {
  const auto made = static_cast<std::size_t>(weights.front().shard_dim);  // dimension
  std::int64_t cols = 0;
  for (const ParamSpec& weight : weights) cols += weight.shape[made];
  const int y = value(name + ".out", Home::cut, cols);
  BlockOp& op = product(OpKind::linear, name, x, y);
  op.order = made == 1 ? WeightOrder::in_out : WeightOrder::out_in;
  op.weights = std::move(weights);
  op.biases = std::move(biases);
  return y;
}

int BlockBuilder::rows(const std::string& name, int x, ParamSpec weight) {
  const bool in_out = weight.shard_dim == 0;
  const int y = value(name + ".out", Home::partial_sum, weight.shape[in_out ? 1 : 0]);
  BlockOp& op = product(OpKind::linear, name, x, y);
  op.order = in_out ? WeightOrder::in_out : WeightOrder::out_in;
  op.weights = {std::move(weight)};
  return y;
}

int BlockBuilder::rope(int qkv, bool windowed) {
  const int turned = value("turned", Home::cut, width(qkv), Again::with_input);
  add(OpKind::rope, "rope", {qkv}, {turned}, {}).windowed = windowed;
  return turned;
}

int BlockBuilder::attention(int qkv, bool windowed, std::vector<ParamSpec> sinks) {
  const int core = value("core", Home::cut, width(qkv), Again::with_input),
            out = value("attended", Home::cut, m_.attention_width()),
            lse = value("lse", Home::cut, m_.num_heads);
  BlockOp& op = add(OpKind::attention, "attention", {qkv}, {core, out, lse}, {core, out, lse});
  op.windowed = windowed;
  op.weights = std::move(sinks);
  return out;
}

int BlockBuilder::compressed(const std::string& name, int x, std::vector<ParamSpec> weights) {
  std::int64_t cols = 0;
  for (const ParamSpec& weight : weights) cols += weight.shape.front();
  const int y = value(name + ".out", program_.value(x).home, cols);
  add(OpKind::linear, name, {x}, {y}, {x}).weights = std::move(weights);
  return y;
}

int BlockBuilder::latent(int compressed, int queries, std::vector<ParamSpec> weights) {
  const int qkv = value("latent.out", Home::cut, 3 * m_.attention_width());
  std::vector<int> inputs{compressed};
  if (queries >= 0) inputs.push_back(queries);
  BlockOp& op = add(OpKind::latent, "latent", std::move(inputs), {qkv}, {compressed});
  op.wants.front() = Home::whole;
  op.weights = std::move(weights);
  return qkv;
}

int BlockBuilder::state_space(int mixed, std::vector<ParamSpec> weights, std::vector<ParamSpec> biases) {
  const int core = value("core", Home::cut, width(mixed), Again::with_input),
            y = value("scanned", Home::cut, m_.state_space.width());
  BlockOp& op = add(OpKind::state_space, m_.state_space.is_delta() ? "delta_rule" : "state_space", {mixed},
                    {core, y}, {core});
  op.weights = std::move(weights);
  op.biases = std::move(biases);
  return y;
}

int BlockBuilder::short_conv(int bcx, ParamSpec taps) {
  const int core = value("core", Home::cut, width(bcx), Again::with_input),
            y = value("convolved", Home::cut, width(bcx) / 3, Again::with_backward);
  add(OpKind::short_conv, "short_conv", {bcx}, {core, y}, {core}).weights = {std::move(taps)};
  return y;
}

int BlockBuilder::scale(const std::string& name, int x, const std::vector<ParamSpec>& made_by,
                        const std::vector<double>& factors) {
  check(made_by.size() == factors.size(), "each weight has a factor");
  if (std::all_of(factors.begin(), factors.end(), [](double factor) { return factor == 1; })) return x;
  const int y = value(name + ".out", program_.value(x).home, width(x), Again::with_input);
  BlockOp& op = add(OpKind::scale, name, {x}, {y}, {});
  for (std::size_t i = 0; i < factors.size(); ++i) op.scaled.push_back({made_by[i], factors[i]});
  return y;
}

int BlockBuilder::gate(int x, int g) {
  const int y = value("gated", Home::cut, width(x), Again::with_backward);
  add(OpKind::gate, "gate", {x, g}, {y}, {x, g});
  return y;
}

int BlockBuilder::narrow(int attended) {
  const int y = value("narrow.out", Home::cut, m_.attended_width(), Again::always);
  add(OpKind::narrow, "narrow", {attended}, {y}, {});
  return y;
}

int BlockBuilder::join(const std::string& name, int x, int y) {
  const int both = value(name + ".out", program_.value(x).home, width(x) + width(y));
  add(OpKind::join, name, {x, y}, {both}, {});
  return both;
}

int BlockBuilder::activation(int x, Activation activation, std::vector<ParamSpec> parameters) {
  const int hidden = value("hidden", Home::cut, width(x), Again::with_input),
            y = value("activated", Home::cut, width(x) / (is_gated(activation) ? 2 : 1),
                      Again::with_backward);
  BlockOp& op = add(OpKind::activation, "activation", {x}, {hidden, y}, {hidden});
  op.activation = activation;
  op.weights = std::move(parameters);
  return y;
}

int BlockBuilder::residual(const std::string& name, int x, int y, std::vector<ParamSpec> biases) {
  const int sum = value(name + ".out", Home::residual, width(x));
  BlockOp& op = add(OpKind::residual, name, {x, y}, {sum}, {});
  op.wants = {Home::residual, Home::residual};
  op.biases = std::move(biases);
  return sum;
}

int BlockBuilder::sum(const std::string& name, int x, double scale) {
  const int y = value(name + ".out", Home::residual, width(x));
  BlockOp& op = add(OpKind::sum, name, {x}, {y}, {});
  op.wants = {Home::residual};
  op.scale = scale;
  return y;
}

int BlockBuilder::experts(int x, int sent, std::vector<ParamSpec> weights, std::vector<ParamSpec> biases) {
  const int hidden = value("routed", Home::experts, (m_.matrices_per_expert() - 1) * m_.expert_hidden),
            y = value("experts.out", Home::partial_sum, width(sent < 0 ? x : sent));
  std::vector<int> inputs{x};
  if (sent >= 0) inputs.push_back(sent);
  std::vector<int> reads = inputs;
  reads.push_back(hidden);
  BlockOp& in = add(OpKind::experts_in, "experts_in", std::move(inputs), {hidden}, std::move(reads));
  in.weights = std::move(weights);
  in.biases = std::move(biases);
  add(OpKind::experts_out, "experts_out", {hidden}, {y}, {hidden});
  return y;
}

int BlockBuilder::loss(int x, ParamSpec table, const char* untied) {
  const int sum = value("loss", Home::same, 1);
  BlockOp& op = product(OpKind::loss, "loss", x, sum);
  op.tied = m_.tied_embedding;
  ParamSpec own = cut_rows(untied, m_.vocab, m_.hidden, 1, m_.init_std);
  own.is_vocabulary = true;
  if (m_.output_bias) op.biases = {cut_bias(module_of(own) + ".bias", m_.vocab, own.pieces)};
  op.weights = {op.tied ? std::move(table) : std::move(own)};
  return sum;
}

int BlockBuilder::next_loss(int x, double weight) {
  const BlockOp first = *program_.find(OpKind::loss);
  const int sum = value("next_loss", Home::same, 1);
  BlockOp& op = product(OpKind::loss, "next_loss", x, sum);
  op.tied = op.next = true;
  op.weights = first.weights;
  op.scale = weight;
  return sum;
}

BlockProgram BlockBuilder::finish(int output) {
  program_.output = output;
  return std::move(program_);
}

static ParamSpec vector(std::string name, std::int64_t width, Init init) {
  ParamSpec p;
  p.name = std::move(name);
  p.shape = {width};
  p.init = init;
  p.decay = false;
  p.multiplies = false;
  p.rows_are_sequence_sharded = true;
  return p;
}

ParamSpec norm_weight(std::string name, std::int64_t width) {
  return vector(std::move(name), width, Init::ones);
}

ParamSpec head_norm_weight(std::string name, std::int64_t head_dim) {
  ParamSpec p = norm_weight(std::move(name), head_dim);
  p.rows_are_sequence_sharded = false;
  p.tp_partial = true;
  return p;
}

ParamSpec whole_number(std::string name, double begin) {
  ParamSpec p = vector(std::move(name), 1, Init::constant);
  p.init_std = begin;
  p.rows_are_sequence_sharded = false;
  p.tp_partial = true;
  return p;
}

ParamSpec whole_bias(std::string name, std::int64_t width) {
  return vector(std::move(name), width, Init::zeros);
}

ParamSpec cut_bias(std::string name, std::int64_t width, std::vector<Piece> pieces) {
  ParamSpec p = vector(std::move(name), width, Init::zeros);
  p.shard_dim = 0;
  p.pieces = std::move(pieces);
  p.rows_are_sequence_sharded = false;
  return p;
}

ParamSpec repeated(ParamSpec cut) {
  for (Piece& piece : cut.pieces) piece.repeats = true;
  return cut;
}

ParamSpec cut_norm_weight(std::string name, std::int64_t width, std::int64_t head_dim) {
  ParamSpec p = cut_bias(std::move(name), width, {{width, head_dim}});
  p.init = Init::ones;
  return p;
}

ParamSpec matrix(std::string name, std::int64_t rows, std::int64_t cols, int shard_dim,
                 std::vector<Piece> pieces, double std) {
  ParamSpec p;
  p.name = std::move(name);
  p.shape = {rows, cols};
  p.shard_dim = shard_dim;
  p.pieces = std::move(pieces);
  p.init_std = std;
  return p;
}

ParamSpec cut_rows(std::string name, std::int64_t rows, std::int64_t cols, std::int64_t unit, double std) {
  return matrix(std::move(name), rows, cols, 0, {{rows, unit}}, std);
}

ParamSpec cut_columns(std::string name, std::int64_t rows, std::int64_t cols, std::int64_t unit, double std) {
  return matrix(std::move(name), rows, cols, 1, {{cols, unit}}, std);
}

ParamSpec whole_matrix(std::string name, std::int64_t rows, std::int64_t cols, double std) {
  ParamSpec p = matrix(std::move(name), rows, cols, -1, {}, std);
  p.rows_are_sequence_sharded = true;
  return p;
}

ParamSpec embedding_table(std::string name, const ModelSpec& m) {
  ParamSpec table = cut_rows(std::move(name), m.vocab, m.hidden, 1, m.init_std);
  table.multiplies = m.tied_embedding;  // as the output matrix; the lookup is no product
  table.is_vocabulary = true;
  return table;
}

double residual_std(const ModelSpec& m) {
  return m.init_std / std::sqrt(static_cast<double>(m.parts_per_layer() * m.num_layers));
}

}  // namespace echelon
