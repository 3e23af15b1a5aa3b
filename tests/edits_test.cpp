#include "base/edits.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace echelon::edits_test {
namespace {

TEST(Edits, AreInsertionsOmissionsReplacementsAndExchanges) {
  EXPECT_EQ(edits("", ""), 0);
  EXPECT_EQ(edits("", "abc"), 3);
  EXPECT_EQ(edits("abc", ""), 3);
  EXPECT_EQ(edits("train", "train"), 0);
  EXPECT_EQ(edits("trian", "train"), 1);
  EXPECT_EQ(edits("kitten", "sitting"), 3);
  EXPECT_EQ(edits("ca", "abc"), 3) << "what has been exchanged is not edited again";
  for (const char* a : {"", "ab", "ba", "abcd", "badc"})
    for (const char* b : {"", "a", "bac", "dcba"}) EXPECT_EQ(edits(a, b), edits(b, a)) << a << " " << b;
}

TEST(Edits, FindTheNameThatWasMeant) {
  const std::vector<std::string> flags{"dp", "tp", "pp", "micro-batch", "checkpoint", "checkpoints-kept"};
  EXPECT_EQ(nearest("dpp", flags), "dp") << "as near as pp, and begins alike";
  EXPECT_EQ(nearest("ppp", flags), "pp");
  EXPECT_EQ(nearest("microbatch", flags), "micro-batch");
  EXPECT_EQ(nearest("MICRO-BATCH", flags), "micro-batch");
  EXPECT_EQ(nearest("mic", flags), "micro-batch") << "the only one that begins so";
  EXPECT_EQ(nearest("check", flags), "") << "two begin so";
  EXPECT_EQ(nearest("heads", {"num_kv_heads", "num_heads", "head_dim"}), "num_heads") << "the shorter one";
  EXPECT_EQ(nearest("tokens", {"min-tokens", "max-tokens"}), "") << "neither is nearer";
  EXPECT_EQ(nearest("kept", flags), "checkpoints-kept");
  EXPECT_EQ(nearest("ept", flags), "") << "so few letters are in many names";
  EXPECT_EQ(nearest("colour", flags), "");
  EXPECT_EQ(nearest("", flags), "");
  EXPECT_EQ(nearest(std::string(1000, 'p'), flags), "");
  EXPECT_EQ(nearest("dp", {}), "");
  EXPECT_EQ(did_you_mean("tpp", flags), " (did you mean tp?)");
  EXPECT_EQ(did_you_mean("check", flags), " (did you mean checkpoint or checkpoints-kept?)");
  EXPECT_EQ(did_you_mean("gpt", {"llama", "gpt-a", "GPT-b", "gpt-c"}),
            " (did you mean gpt-a, GPT-b or gpt-c?)");
  EXPECT_EQ(did_you_mean("gp", {"gpt-a", "gpt-b"}), "") << "so few letters";
  EXPECT_EQ(did_you_mean("gpt", std::vector<std::string>{"gpt-a", "gpt-b", "gpt-c", "gpt-d", "gpt-e", "gpt-f",
                                                         "gpt-g"}),
            "")
      << "too many";
  EXPECT_EQ(did_you_mean("colour", flags), "");
}

}  // namespace
}  // namespace echelon::edits_test
