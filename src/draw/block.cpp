#include "draw/block.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "draw/bars.h"
#include "spec/block_passes.h"
#include "spec/model_spec.h"

namespace echelon {
namespace {

class SvgBlock {
  // In pixels.
  static constexpr double box_width = 200, box_height = 40, gap = 56, lane = 18, head = 96, chip_gap = 14;

 public:
  static constexpr double foot = 40;

  SvgBlock(const BlockDrawing& drawing, const BlockSetting& setting)
      : p_(drawing.program),
        title_(drawing.title),
        s_(setting),
        passes_(block_passes(p_, setting.recompute)) {
    for (const BlockOp& op : p_.ops) read_.insert(op.backward_reads.begin(), op.backward_reads.end());
    for (const OpSequence& sequence : passes_.again) again_.insert(sequence.ops.begin(), sequence.ops.end());
    for (std::size_t to = 0; to < p_.ops.size(); ++to)
      for (std::size_t input = 0; input < p_.ops[to].inputs.size(); ++input) {
        const int value = p_.ops[to].inputs[input], from = p_.producer(value);
        edges_.push_back({value, from, static_cast<int>(to), input});
        if (from + 1 != static_cast<int>(to)) ++lanes_;
      }
  }

  double left() const { return 24 + lane * lanes_; }
  double width() const { return left() + box_width + 290; }
  double height() const { return bottom(static_cast<int>(p_.ops.size()) - 1) + gap + foot; }

  std::string draw(double x) {
    x_ = x + left();
    text(x_ - left() + 24, 24, "title", title_);
    for (std::size_t i = 0; i < p_.ops.size(); ++i) draw_op(static_cast<int>(i));
    int used = 0;
    for (const Edge& edge : edges_)
      if (edge.from + 1 == edge.to)
        straight(edge);
      else
        around(edge, used++);
    const int last = static_cast<int>(p_.ops.size()) - 1;
    if (p_.input < 0) {
      line(fmt::format("M{0} {1}V{2}", middle(), top(0) - gap + 8, top(0)), "edge");
      text(middle() + 10, top(0) - gap / 2, "value", "tokens");
    }
    line(fmt::format("M{0} {1}V{2}", middle(), bottom(last), bottom(last) + gap - 8), "edge");
    label(p_.output, bottom(last) + 22, moved(p_.value(p_.output).home, p_.output_home()));
    return out_;
  }

 private:
  struct Edge {
    int value, from, to;  // ops; -1: from outside
    std::size_t input;
  };

  static double top(int op) { return head + op * (box_height + gap); }
  static double bottom(int op) { return top(op) + box_height; }
  double middle() const { return x_ + box_width / 2; }

  void line(const std::string& path, const char* kind) {
    fmt::format_to(std::back_inserter(out_), "<path class=\"{}\" d=\"{}\"/>\n", kind, path);
  }
  void text(double x, double y, const char* kind, const std::string& words) {
    fmt::format_to(std::back_inserter(out_), "<text x=\"{:.0f}\" y=\"{:.0f}\" class=\"{}\">{}</text>\n", x, y,
                   kind, escape_markup(words));
  }

  bool is_kept(int value) const {
    return passes_.forward.keeps[static_cast<std::size_t>(value)] &&
           (value != p_.output || read_.contains(value));
  }
  bool is_made_again(int value) const { return read_.contains(value) && !is_kept(value); }

  std::string place(Home home) const {
    switch (home) {
      case Home::residual:
        return s_.sequence_parallel && s_.tp > 1 ? "S(0)" : "I";
      case Home::whole:
        return "R";
      case Home::cut:
        return "S(1)";
      case Home::partial_sum:
        return "P";
      case Home::experts:
        return "with the experts";
      case Home::same:
        return "I";
    }
    return "";
  }

  // The collectives that bring a value from one home to another, and its gradient back (layout.h).
  std::string moved(Home from, Home to) const {
    if (from == to || s_.tp == 1) return "";
    const bool leaves = from == Home::partial_sum;
    std::string words = place(from) + " \u2192 " + place(leaves ? Home::residual : Home::whole) + ": ";
    if (s_.sequence_parallel)
      return words + (leaves ? "reduce_scatter, back all_gather" : "all_gather, back reduce_scatter");
    return words + (leaves ? "all_reduce, back nothing" : "nothing, back all_reduce");
  }

  std::string words_of(int value) const {
    const BlockValue& v = p_.value(value);
    std::string words = fmt::format("{}  {}", v.name, v.width);
    if (s_.tp > 1) words += "  " + place(v.home);
    return words;
  }

  // The value below its producer, with what the backward pass finds of it.
  void mark(int value, double x, double y) {
    if (is_kept(value))
      fmt::format_to(std::back_inserter(out_),
                     "<rect class=\"kept\" x=\"{:.0f}\" y=\"{:.0f}\" width=\"9\" height=\"9\"/>\n", x, y - 9);
    else if (is_made_again(value))
      fmt::format_to(std::back_inserter(out_),
                     "<rect class=\"again\" x=\"{:.0f}\" y=\"{:.0f}\" width=\"9\" height=\"9\"/>\n", x,
                     y - 9);
    text(x + 14, y, "value", words_of(value));
  }
  void label(int value, double y, const std::string& collective) {
    mark(value, middle() + 10, y);
    if (!collective.empty()) text(middle() + 24, y + 16, "collective", collective);
  }

  void draw_op(int i) {
    const BlockOp& op = p_.ops[static_cast<std::size_t>(i)];
    fmt::format_to(
        std::back_inserter(out_),
        "<rect class=\"op{}\" x=\"{:.0f}\" y=\"{:.0f}\" width=\"{:.0f}\" height=\"{:.0f}\" rx=\"5\"/>\n",
        again_.contains(i) ? " again" : "", x_, top(i), box_width, box_height);
    std::int64_t tied = 0, own = 0;
    for (const ParamSpec& spec : op.weights) (op.tied ? tied : own) += spec.numel();
    for (const ParamSpec& spec : op.biases) own += spec.numel();
    for (const Adapter& adapter : op.adapters) own += adapter.a.numel() + adapter.b.numel();
    const std::string kind = op.name == name_of(op.kind) ? "" : name_of(op.kind);
    text(x_ + 10, top(i) + 17, "name", op.name);
    std::string below = kind;
    for (const auto& [count, what] : {std::pair{tied, "tied weights"}, {own, "weights"}})
      if (count > 0) below += fmt::format("{}{} {}", below.empty() ? "" : ", ", count, what);
    text(x_ + 10, top(i) + 32, "kind", below);
    // What no other op reads is for the backward pass.
    double y = top(i) + 14;
    for (int value : op.outputs) {
      const bool goes_on = value == p_.output || std::any_of(edges_.begin(), edges_.end(),
                                                             [&](const Edge& e) { return e.value == value; });
      if (goes_on) continue;
      line(fmt::format("M{} {}h{}", x_ + box_width, y - 4, 8), "edge plain");
      mark(value, x_ + box_width + 12, y);
      y += chip_gap;
    }
  }

  std::string collective(const Edge& edge) const {
    return moved(p_.value(edge.value).home, p_.ops[static_cast<std::size_t>(edge.to)].wants[edge.input]);
  }

  void straight(const Edge& edge) {
    const double begin = edge.from < 0 ? top(0) - gap + 8 : bottom(edge.from);
    line(fmt::format("M{} {}V{}", middle(), begin, top(edge.to)), "edge");
    label(edge.value, begin + 22, collective(edge));
  }

  // Past the ops between, on a lane of its own.
  void around(const Edge& edge, int number) {
    const double begin = edge.from < 0 ? top(0) - gap + 8 : bottom(edge.from), side = x_ - 12 - lane * number;
    line(fmt::format("M{} {}v6H{}V{}H{}", middle(), begin, side, top(edge.to) + box_height / 2, x_), "edge");
    // Named where it is made, if the next op does not read it.
    const auto first = std::find_if(edges_.begin(), edges_.end(),
                                    [&](const Edge& other) { return other.value == edge.value; });
    if (first->from + 1 != first->to && &*first == &edge) mark(edge.value, middle() + 10, begin + 22);
    const std::string words = collective(edge);
    if (!words.empty()) text(x_ + box_width + 12, bottom(edge.to), "collective", words);
  }

  const BlockProgram& p_;
  std::string title_;
  const BlockSetting& s_;
  BlockPasses passes_;
  std::set<int> read_, again_;  // values that backward passes read; ops that are run again
  std::vector<Edge> edges_;
  int lanes_ = 0;
  double x_ = 0;
  std::string out_;
};

}  // namespace

std::string block_svg(const std::vector<BlockDrawing>& blocks, const BlockSetting& setting) {
  double width = 0, height = 0;
  std::string body;
  for (const BlockDrawing& block : blocks) {
    SvgBlock one(block, setting);
    body += one.draw(width);
    width += one.width();
    height = std::max(height, one.height());
  }
  width = std::max(width, 760.0);
  const std::string plan = fmt::format("tp {}{}, recompute {}", setting.tp,
                                       setting.tp == 1             ? ""
                                       : setting.sequence_parallel ? ", sequence parallel"
                                                                   : "",
                                       recompute_name(setting.recompute));
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\">\n"
      "<style>.title{{font-size:15px;font-weight:bold}}.name{{font-weight:bold}}.kind{{fill:#555;font-size:"
      "11px}}"
      ".op{{fill:#eef2f7;stroke:#4a6785}}.again{{stroke-dasharray:4 3}}rect.kept{{fill:#d9822b}}"
      "rect.again{{fill:white;stroke:#d9822b;stroke-dasharray:2 2}}.op.again{{fill:#eef2f7;stroke:#4a6785;"
      "stroke-dasharray:4 3}}.collective{{fill:#a3262a;font-size:11px}}"
      ".edge{{fill:none;stroke:#4a6785;marker-end:url(#arrow)}}.plain{{marker-end:none}}</style>\n"
      "<defs><marker id=\"arrow\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" "
      "markerHeight=\"7\" "
      "orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" fill=\"#4a6785\"/></marker></defs>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{2}"
      "<rect class=\"kept\" x=\"24\" y=\"{3:.0f}\" width=\"9\" height=\"9\"/>"
      "<text x=\"38\" y=\"{4:.0f}\">kept for the backward pass</text>\n"
      "<rect class=\"again\" x=\"210\" y=\"{3:.0f}\" width=\"9\" height=\"9\"/>"
      "<text x=\"224\" y=\"{4:.0f}\">made there</text>\n"
      "<text x=\"340\" y=\"{4:.0f}\">dashed op: run there</text>\n"
      "<text x=\"480\" y=\"{4:.0f}\">name, width{5}; {6}</text>\n</svg>\n",
      width, height, body, height - 25, height - 16, setting.tp > 1 ? ", place along tp" : "", plan);
}

std::vector<BlockDrawing> block_drawings(const ModelSpec& m) {
  std::vector<BlockDrawing> blocks{{m.name + ": embedding", embedding_program(m)}};
  for (const LayerKind& kind : layer_kinds(m)) blocks.push_back({kind.name, layer_program(m, kind.layer)});
  blocks.push_back({"output layer", head_program(m)});
  return blocks;
}

}  // namespace echelon
