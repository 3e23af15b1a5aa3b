// The blocks of models as pictures.
#include "draw/block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "spec/model_spec.h"

namespace echelon::block_drawing_test {
namespace {

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

std::string drawing(const char* preset, const BlockSetting& setting) {
  return block_svg(block_drawings(load_model(preset)), setting);
}

TEST(BlockDrawing, ShowsEveryOpAndValueOfEveryPreset) {
  for (const std::string& preset : model_preset_names()) {
    const std::vector<BlockDrawing> blocks = block_drawings(load_model(preset));
    const std::string svg = block_svg(blocks, {2, true, Recompute::selective});
    EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n")) << preset;
    std::size_t ops = 0;
    for (const BlockDrawing& block : blocks) {
      ops += block.program.ops.size();
      for (const BlockValue& v : block.program.values)
        EXPECT_NE(svg.find(">" + v.name + "  "), std::string::npos) << preset << " " << v.name;
    }
    EXPECT_EQ(static_cast<std::size_t>(count(svg, "<rect class=\"op")), ops) << preset;
    // Nothing from elsewhere.
    EXPECT_EQ(count(svg, "href"), 0) << preset;
    EXPECT_EQ(count(svg, "http"), 1) << preset;
  }
}

// The two entries and exits of a layer, the embedding's exit, the output layer's entry (Megatron's f and g).
TEST(BlockDrawing, NamesTheCollectives) {
  const std::string one = drawing("llama-tiny", {1, false, Recompute::none});
  EXPECT_EQ(count(one, "class=\"collective\""), 0);
  const std::string tp = drawing("llama-tiny", {2, false, Recompute::none});
  EXPECT_EQ(count(tp, "P \u2192 I: all_reduce, back nothing"), 3);
  EXPECT_EQ(count(tp, "I \u2192 R: nothing, back all_reduce"), 3);
  const std::string sp = drawing("llama-tiny", {2, true, Recompute::none});
  EXPECT_EQ(count(sp, "P \u2192 S(0): reduce_scatter, back all_gather"), 3);
  EXPECT_EQ(count(sp, "S(0) \u2192 R: all_gather, back reduce_scatter"), 3);
}

TEST(BlockDrawing, MarksWhatIsKeptAndWhatIsMadeAgain) {
  const auto marks = [](const Recompute& recompute, const char* kind) {
    return count(drawing("gpt2-tiny", {1, false, recompute}), std::string("<rect class=\"") + kind + "\" x");
  };
  const int legend = 1;
  EXPECT_GT(marks(Recompute::none, "kept"), marks(Recompute::selective, "kept"));
  EXPECT_GT(marks(Recompute::selective, "kept"), marks(Recompute::full, "kept"));
  EXPECT_GT(marks(Recompute::none, "kept"), marks(Recompute({"mlp_in"}), "kept"));
  EXPECT_GT(marks(Recompute::full, "kept"), legend);  // what each block begins with
  EXPECT_LT(marks(Recompute::none, "again"), marks(Recompute::full, "again"));
  // With everything kept norms alone are run again, from their statistics.
  EXPECT_LT(marks(Recompute::none, "op again"), marks(Recompute::full, "op again"));
}

}  // namespace
}  // namespace echelon::block_drawing_test
