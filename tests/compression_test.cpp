#include "spec/compression.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/error.h"
#include "compression_buckets.h"
#include "reduction_predictions.h"
#include "spec/model_spec.h"

namespace echelon::compression_test {
namespace {

using namespace compression_tests;

std::string refusal(const std::string& text) {
  try {
    method(text);
  } catch (const RequestError& error) {
    return error.what();
  }
  return "";
}

TEST(Compression, ReadsAndWritesEveryMethod) {
  for (const char* text :
       {"none", "bf16", "fp16", "int8", "topk:0.01", "topk:1", "topk:1e-05", "powersgd:4", "powersgd:1:100"})
    EXPECT_EQ(compression_text(method(text)), text);
  EXPECT_EQ(method("topk:.25").fraction, 0.25);
  EXPECT_EQ(method("powersgd:8:0"), method("powersgd:8"));
  EXPECT_EQ(method("powersgd:8:20").warmup_steps, 20);
}

TEST(Compression, RefusesInOneSentence) {
  EXPECT_EQ(refusal("zip"),
            "--compress zip: no such method; legal: none, bf16, fp16, int8, topk:R, powersgd:R");
  for (const char* text : {"", "none:1", "bf16:", "int8:8", " bf16", "BF16"})
    EXPECT_EQ(refusal(text).find(std::string("--compress ") + text + ": no such method"), 0u) << text;
  for (const char* text : {"topk", "topk:", "topk:0", "topk:-0.1", "topk:1.5", "topk:nan", "topk:inf",
                           "topk:0.1x", "topk: 0.1", "topk:0.1:2"})
    EXPECT_EQ(refusal(text), std::string("--compress ") + text +
                                 ": legal: topk:R, where R, the fraction of elements sent, is above 0 and at "
                                 "most 1");
  for (const char* text :
       {"powersgd", "powersgd:", "powersgd:0", "powersgd:-1", "powersgd:2.5", "powersgd:2:", "powersgd:2:-1",
        "powersgd::3", "powersgd:2:3:4", "powersgd:99999999999999999999"})
    EXPECT_EQ(refusal(text).find(std::string("--compress ") + text + ": legal: powersgd:R or powersgd:R:W"),
              0u)
        << text;
}

// On every tp rank the sections of every bucket are the parameters that lie there; tp ranks that hold the
// same slice of a parameter call it the same, and others do not.
TEST(Compression, SectionsAreTheParametersOfABucket) {
  for (const char* name : {"gpt2-tiny", "llama-tiny"}) {
    const ModelSpec model = load_model(name);
    std::vector<std::vector<ParamSpec>> groups{embedding_parameters(model)};
    for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
      groups.push_back(block_parameters(model, layer));
    groups.push_back(head_parameters(model));
    for (int tp : {1, 2, 4}) {
      std::map<std::string, std::map<std::int64_t, std::vector<int>>>
          slices;  // name -> first logical element
      for (int index = 0; index < tp; ++index) {
        const FlatLayout layout = flat_layout(groups, tp, index);
        std::int64_t covered = 0;
        for (const auto& [range, experts] : gradient_buckets(layout, 50000)) {
          EXPECT_FALSE(experts);
          const GradientBucket bucket = gradient_bucket(groups, layout, range, tp, index);
          ASSERT_EQ(bucket.numel(), range.size());
          for (const GradientSection& s : bucket.sections) {
            ASSERT_EQ(s.rows * s.cols, s.range.size());
            covered += s.range.size();
            for (const auto& group : groups)
              for (const ParamSpec& spec : group)
                if (spec.name == s.name) {
                  ASSERT_EQ(s.range.size(), local_numel(spec, tp, index));
                  const std::int64_t first =
                      spec.shard_dim < 0 ? 0 : local_ranges(spec, tp, index).front().begin;
                  slices[s.name][first].push_back(s.slice);
                }
          }
        }
        ASSERT_EQ(covered, layout.size());
      }
      for (const auto& [parameter, of] : slices) {
        std::set<int> seen;
        for (const auto& [first, numbers_there] : of) {
          for (int slice : numbers_there) EXPECT_EQ(slice, numbers_there.front()) << parameter;
          EXPECT_TRUE(seen.insert(numbers_there.front()).second) << parameter;
        }
      }
    }
  }
}

// The formulas of docs/compression.md, by hand.
TEST(Compression, BytesOfABucketWorkedByHand) {
  const GradientBucket bucket = bucket_of({{1000, 24}});  // 24000 elements, 94 blocks, the last of 192
  const auto sent = [&](const char* compress, int n, int rank) {
    return compressed_bytes_sent(method(compress), bucket, DType::f32, n, rank, 0);
  };
  EXPECT_EQ(sent("none", 4, 2), 2 * 3 * 6000 * 4);
  EXPECT_EQ(sent("bf16", 4, 2), 2 * 3 * 6000 * 2);
  // Cut at 6144, 12032, 18176: 24, 23, 24 and 23 blocks.
  EXPECT_EQ(sent("int8", 4, 0), (24000 - 6144) + 4 * 70 + 3 * (6144 + 4 * 24));
  EXPECT_EQ(sent("int8", 4, 3), 18176 + 4 * 71 + 3 * (5824 + 4 * 23));
  EXPECT_EQ(sent("fp16", 4, 1), 2 * (24000 - 5888) + 4 * 71 + 3 * (2 * 5888 + 4 * 23));
  EXPECT_EQ(sent("topk:0.01", 4, 0), 3 * 240 * 8);
  EXPECT_EQ(sent("powersgd:4", 4, 0), 2 * 3 * 1000 * 4 + 2 * 3 * 24 * 4);
  EXPECT_EQ(compressed_bytes_sent(method("powersgd:4:2"), bucket, DType::f32, 4, 0, 1), 2 * 3 * 6000 * 4);
  EXPECT_EQ(compressed_bytes_sent(method("int8"), bucket, DType::f32, 1, 0, 0), 0);
}

// What is promised of the bytes, as a part of the f32 all_reduce's, on the matrix of 1024 x 1024.
TEST(Compression, SendsTheFractionsPromised) {
  const GradientBucket bucket = bucket_of({{1024, 1024}});
  const auto fraction = [&](const char* compress, int ranks, int rank) {
    const auto bytes = [&](const char* text) {
      return static_cast<double>(compressed_bytes_sent(method(text), bucket, DType::f32, ranks, rank, 0));
    };
    return bytes(compress) / bytes("none");
  };
  for (int ranks : {2, 3, 4, 8})
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LT(fraction("bf16", ranks, rank), 0.5001);
      EXPECT_LT(fraction("fp16", ranks, rank), 0.51);
      EXPECT_LT(fraction("int8", ranks, rank), 0.27);
      EXPECT_LT(fraction("powersgd:4", ranks, rank), 0.01);
      // Every pair travels to every rank: n R.
      EXPECT_NEAR(fraction("topk:0.01", ranks, rank), 0.01 * ranks, 1e-5);
    }
  EXPECT_LT(fraction("topk:0.01", 2, 0), 0.03);
}

}  // namespace
}  // namespace echelon::compression_test
