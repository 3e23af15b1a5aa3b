// What others measured, read and fitted.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <tuple>

#include "base/error.h"
#include "plan/fit.h"
#include "plan/least_squares.h"
#include "plan/op_seconds.h"
#include "plan/step_model.h"
#include "published/csv.h"
#include "published/tables.h"
#include "refusals.h"
#include "tensor/kernels.h"
#include "verb_test.h"
#include "workloads.h"

namespace echelon::calibrate_from_test {
namespace {

using checks::expect_refusal;

Measurements read(const std::string& text, const std::string& file, const std::string& model = "") {
  Measurements m;
  read_measurements(text, file, model, m);
  return m;
}

const std::string nccl_head =
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: "
    "1\n"
    "# Using devices\n"
    "#  Rank  0 Group  0 Pid   1201 on     node01 device  0 [0x07] NVIDIA A100-SXM4-80GB\n"
    "#  Rank  1 Group  0 Pid   1202 on     node01 device  1 [0x0a] NVIDIA A100-SXM4-80GB\n"
    "#  Rank  2 Group  0 Pid    991 on     node02 device  0 [0x07] NVIDIA A100-SXM4-80GB\n"
    "#  Rank  3 Group  0 Pid    992 on     node02 device  1 [0x0a] NVIDIA A100-SXM4-80GB\n"
    "#\n"
    "#                                                              out-of-place                       "
    "in-place\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   "
    "busbw #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  "
    "(GB/s)\n";

TEST(CalibrateFrom, ReadsNcclTests) {
  const std::string rows =
      "node01:1201:1201 [0] NCCL INFO cudaDriverVersion 12040\n"
      "     1048576        262144     float     sum      -1    62.15   16.87   25.31      0    61.04   17.18 "
      "  25.77  "
      "    0\n"
      "     2097152        524288     float     sum      -1    81.50   25.73   38.60      0    80.99   25.89 "
      "  38.84  "
      "    0\n"
      "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 32.13\n";
  const Measurements m = read(nccl_head + rows, "all_reduce_perf.txt");
  ASSERT_EQ(m.collectives.size(), 2u);
  EXPECT_EQ(m.collectives[0].verb, Verb::all_reduce);
  EXPECT_EQ(m.collectives[0].ranks, 4);
  EXPECT_EQ(m.collectives[0].hosts, 2);
  EXPECT_DOUBLE_EQ(m.collectives[1].bytes, 2097152);
  EXPECT_DOUBLE_EQ(m.collectives[1].seconds, 81.5e-6);
  EXPECT_EQ(m.collectives[1].where, "all_reduce_perf.txt, line 13");
  EXPECT_EQ(read("# Collective test starting: reduce_scatter_perf\n" + nccl_head +
                     "  1048576  262144  float  sum  -1  62.15  16.87  12.65  0  61.04  17.18  12.88  0\n",
                 "out.txt")
                .collectives[0]
                .verb,
            Verb::reduce_scatter);
  expect_refusal([&] { read(nccl_head + rows, "out.txt"); }, {"out.txt", "which collective", "all_gather"});
  expect_refusal(
      [&] { read(nccl_head + "  1048576  262144  float  sum  -1  fast  1 2 0 1 2 3 0\n", "all_reduce.txt"); },
      {"all_reduce.txt, line 11, column 6", "time", "fast"});
  expect_refusal([&] { read(nccl_head + "  1048576  262144  float\n", "all_reduce.txt"); },
                 {"line 11", "3 columns of the 13"});
  expect_refusal([&] { read(nccl_head, "all_reduce.txt"); }, {"without a measurement"});
}

// A row of four ranks: what a test of all_reduce prints of itself, and one of all_gather.
const std::string reduced =
                      "  1048576  262144  float  sum  -1  62.15  16.00  24.00  0  61.0  17.0  25.5  0\n",
                  gathered =
                      "  1048576  262144  float  none  -1  62.15  16.00  12.00  0  61.0  17.0  12.75  0\n";

// The test's name is in its output, or in the file's, whatever the folder is called; what its rows say of
// themselves is not against it.
// Whole nodes at 340 GB/s, as NCCL's rings reach where eight links of 45 carry a node's part together: taken
// for phases one after the other, links between nodes would seem to be five times as fast as they are.
TEST(CalibrateFrom, TellsWhetherRingsKeepAllLinksAtWork) {
  const Machine h100 = load_machine("h100");
  std::vector<MeasuredCollective> measured;
  for (const auto& [hosts, rate] : {std::pair{1, 360e9}, {2, 340e9}, {8, 340e9}})
    for (double bytes = 0x1p24; bytes <= 0x1p33; bytes *= 2) {
      const double ranks = 8.0 * hosts;
      measured.push_back({.verb = Verb::all_reduce,
                          .bytes = bytes,
                          .ranks = 8 * hosts,
                          .hosts = hosts,
                          .seconds = 40e-6 + 2 * (ranks - 1) / ranks * bytes / rate,
                          .where = ""});
    }
  const MachineFit rings = fit_machine(h100, {}, measured);
  EXPECT_TRUE(rings.machine.whole_rings);
  EXPECT_GT(rings.machine.tiers.back().bandwidth, 30e9);
  EXPECT_LT(rings.machine.tiers.back().bandwidth, 50e9);
  EXPECT_GT(rings.collectives.back().before_seconds, 1.2 * rings.collectives.back().measured_seconds);
  EXPECT_NEAR(rings.collectives.back().fitted_seconds / rings.collectives.back().measured_seconds, 1, 0.06);
  for (MeasuredCollective& c : measured) {
    Machine slower = h100;
    slower.tiers.back().bandwidth = 30e9;
    c.seconds = OpSeconds(slower, Software(), Precision::bf16).collective(c.verb, c.bytes, {c.ranks});
  }
  const MachineFit phases = fit_machine(h100, {}, measured);
  EXPECT_FALSE(phases.machine.whole_rings);
  EXPECT_NEAR(phases.machine.tiers.back().bandwidth, 30e9, 3e9);
}

TEST(CalibrateFrom, NcclTestsAreThoseOfTheirNames) {
  const std::string starting = "# Collective test starting: ";
  expect_refusal([&] { read(starting + "sendrecv_perf\n" + nccl_head + reduced, "all_reduce/out.txt"); },
                 {"all_reduce/out.txt, line 1", "sendrecv_perf", "all_reduce, all_gather"});
  expect_refusal([&] { read(nccl_head + reduced, "all_reduce/out.txt"); }, {"which collective"});
  EXPECT_EQ(read(nccl_head + gathered, "all_reduce/all_gather.txt").collectives.at(0).verb, Verb::all_gather);
  EXPECT_EQ(
      read(starting + "all_gather_perf\n" + nccl_head + gathered, "all_reduce.txt").collectives.at(0).verb,
      Verb::all_gather);
  expect_refusal([&] { read(nccl_head + gathered, "all_reduce.txt"); },
                 {"all_reduce.txt, line 11, column 4", "redop none", "all_reduce"});
  expect_refusal([&] { read(nccl_head + reduced, "all_gather.txt"); }, {"redop sum", "all_gather"});
  // A reduce_scatter, as its busbw says.
  expect_refusal(
      [&] {
        read(nccl_head + "  1048576 262144 float sum -1 62.15 16 12 0 61 17 12.75 0\n", "all_reduce.txt");
      },
      {"line 11, column 8", "busbw 12", "1.5 times algbw 16", "4 ranks"});
}

// NCCL_TESTS_SPLIT: groups of ranks that run at once.
TEST(CalibrateFrom, CountsTheRanksOfAGroupOfNcclTests) {
  const auto with_ranks = [](const std::string& ranks) {
    const std::size_t begin = nccl_head.find("#  Rank"), end = nccl_head.find("#\n#  ");
    return nccl_head.substr(0, begin) + ranks + nccl_head.substr(end);
  };
  const auto rank = [](int number, int group, const char* host, int device) {
    return fmt::format("#  Rank {:2} Group {:2} Pid 4711 on {:>10} device {:2} [0x{:02x}] NVIDIA A100\n",
                       number, group, host, device, device);
  };
  const std::string row = "  1048576  262144  float  sum  -1  62.15  16.00  16.00  0  61.0  17.0  17.00  0\n";
  const auto first = [&](const std::string& ranks) {
    return read(with_ranks(ranks) + row, "all_reduce.txt").collectives.at(0);
  };
  const MeasuredCollective across =
      first(rank(0, 0, "a", 0) + rank(1, 1, "a", 1) + rank(2, 0, "b", 0) + rank(3, 1, "b", 1));
  EXPECT_EQ(across.ranks, 2);
  EXPECT_EQ(across.hosts, 2);
  const MeasuredCollective inside =
      first(rank(0, 0, "a", 0) + rank(1, 0, "a", 1) + rank(2, 1, "b", 0) + rank(3, 1, "b", 1));
  EXPECT_EQ(inside.ranks, 2);
  EXPECT_EQ(inside.hosts, 1);
  expect_refusal([&] { first(rank(0, 0, "a", 0) + rank(1, 0, "a", 1) + rank(2, 1, "b", 0)); },
                 {"all_reduce.txt, line 10", "2 ranks on 1 host", "group 1 1 rank"});
  expect_refusal([&] { first(rank(0, 0, "a", 0) + rank(1, 1, "a", 1)); }, {"two at least in a group"});
  // Containers whose hosts have one name have its devices twice.
  const MeasuredCollective twins = first(rank(0, 0, "pod", 0) + rank(1, 0, "pod", 0));
  EXPECT_EQ(twins.hosts, 2);
}

// What hosts print beside the table is none of it.
TEST(CalibrateFrom, LeavesOutWhatStandsBesideTheTable) {
  const Measurements m =
      read(nccl_head + "2025-03-01 10:00:00 node01: WARNING something\n3 of 8 links are up\n" + reduced +
               "2025-03-01 10:00:01 done\n",
           "all_reduce.txt");
  EXPECT_EQ(m.collectives.size(), 1u);
}

// Of two tests in one file each has its own ranks; launchers write a rank and a time before each line, and
// terminals have colours.
TEST(CalibrateFrom, ReadsNcclTestsOneBehindAnother) {
  const auto test = [](const char* name, const std::string& row) {
    return fmt::format("# Collective test starting: {}\n{}{}", name, nccl_head, row);
  };
  const std::string both = test("all_reduce_perf", reduced) + test("all_gather_perf", gathered);
  const Measurements m = read(both, "out.txt");
  ASSERT_EQ(m.collectives.size(), 2u);
  for (const MeasuredCollective& one : m.collectives) EXPECT_EQ(one.ranks, 4);
  EXPECT_EQ(m.collectives[1].verb, Verb::all_gather);
  EXPECT_EQ(m.collectives[1].hosts, 2);
  for (const std::string prefix :
       {"0: ", " 0: ", "[1,0]<stdout>:", "[prterun-node1.a-4711@1,0]<stdout>: ", "[default0]:",
        "Mon Nov 30 10:04:00 2026<stdout>:", "Mon Nov  2 10:04:00 2026[1,0]<stdout>:",
        "2026-11-30T10:04:00.123456789Z ", "2026-11-30T10:04:00+01:00 [1,0]<stdout>:", "Nov 30 10:04:00 ",
        "[2026-11-30 10:04:00,123] ", "\x1b[0;32m", "\x1b(B\x1b[m\x1b[K"}) {
    std::string labelled;
    std::istringstream lines(both);
    for (std::string line; std::getline(lines, line);) labelled += prefix + line + "\n";
    const Measurements same = read(labelled, "out.txt");
    ASSERT_EQ(same.collectives.size(), 2u) << prefix;
    EXPECT_EQ(same.collectives[1].ranks, 4);
    EXPECT_DOUBLE_EQ(same.collectives[1].seconds, m.collectives[1].seconds);
  }
}

TEST(CalibrateFrom, ReadsProducts) {
  const Measurements m = read("m,n,k,precision,us\n4096,8192,1024,bf16,100\n64,64,64,fp8,5.5\n", "gemm.csv");
  ASSERT_EQ(m.products.size(), 2u);
  EXPECT_EQ(m.products[0].rows, 4096);
  EXPECT_EQ(m.products[0].cols, 8192);
  EXPECT_EQ(m.products[0].depth, 1024);
  EXPECT_DOUBLE_EQ(m.products[0].seconds, 1e-4);
  EXPECT_EQ(m.products[1].precision, Precision::fp8);
  EXPECT_EQ(m.products[1].where, "gemm.csv, line 3");
  EXPECT_DOUBLE_EQ(
      read("# from a notebook\nk,m,n,batch,tflops\n512,128,256,4,100\n", "a.csv").products[0].seconds,
      2.0 * 512 * 128 * 256 * 4 / 1e14);
  expect_refusal([] { read("m,n,k,us\n1,2,3,4\n1,2,x,4\n", "a.csv"); },
                 {"a.csv, line 3, column 3", "k", "x"});
  expect_refusal([] { read("m,n,k,us\n1,2,3,-4\n", "a.csv"); }, {"line 2, column 4", "us -4", "above 0"});
  expect_refusal([] { read("m,n,k,us\n1,2,3\n", "a.csv"); }, {"line 2", "3 columns", "header 4"});
  expect_refusal([] { read("m,n,k\n1,2,3\n", "a.csv"); }, {"how long", "tflops"});
  expect_refusal([] { read("m,n,k,us,colour\n1,2,3,4,5\n", "a.csv"); }, {"colour"});
  expect_refusal([] { read("m,n,k,us,us\n1,2,3,4,5\n", "a.csv"); }, {"column 5", "two columns"});
  expect_refusal([] { read("m,n,k,tflops,ms\n1,2,3,4,5\n", "a.csv"); },
                 {"columns ms and tflops", "give one"});
  EXPECT_EQ(read("\xef\xbb\xbf# from a spreadsheet\nm,n,k,us\n1,2,3,4\n", "a.csv").products.size(), 1u);
  expect_refusal([] { read("\"a,b\n", "a.csv"); }, {"line 1", "quote"});
  expect_refusal([] { read("some words\n", "notes.txt"); }, {"notes.txt", "nccl-tests", "torchtitan"});
  expect_refusal([] { read("", "empty.txt"); }, {"empty.txt", "nccl-tests"});
}

TEST(CalibrateFrom, AProductAboveThePeakIsRefused) {
  const Machine h100 = load_machine("h100");
  const auto fit = [&](const char* tflops) {
    const Measurements m =
        read(std::string("m,n,k,tflops\n8192,8192,8192,700\n8192,8192,4096,") + tflops + "\n", "a.csv");
    return fit_machine(h100, m.products, {});
  };
  expect_refusal([&] { fit("6000"); }, {"a.csv, line 3", "6000 TFLOP/s", "peak of h100", "bf16", "unit"});
  EXPECT_EQ(fit("680").products.size(), 2u);
}

// Microseconds in a column of milliseconds. What is small may be all launch.
TEST(CalibrateFrom, AProductOfNoSpeedIsRefused) {
  const auto fit = [](const char* rows) {
    return fit_machine(load_machine("h100"), read(std::string("m,n,k,ms\n") + rows, "a.csv").products, {});
  };
  expect_refusal([&] { fit("8192,8192,8192,1600\n"); },
                 {"a.csv, line 2", "1.6 s a product", "h100 needs at least", "unit"});
  EXPECT_EQ(fit("8192,8192,8192,1.6\n128,128,128,5\n").products.size(), 2u);
}

// Of a step of torchtitan that took so many seconds.
SoftwareFit fit_to_a_step(const char* seconds) {
  const Measurements m = read(
      std::string("gpus,global-batch,seq-len,zero,recompute,seconds\n8,128,8192,3,full,") + seconds + "\n",
      "a.csv", "llama-3-8b");
  return fit_software(load_software("torchtitan"), usual_numbers(), load_machine("h100"), m.steps);
}

TEST(CalibrateFrom, AStepOfNoSpeedIsRefused) {
  for (const char* seconds : {"1e300", "22000"})  // which are milliseconds
    expect_refusal([&] { fit_to_a_step(seconds); },
                   {"a.csv, line 2", "s a step", "torchtitan", "are they seconds?"});
  EXPECT_EQ(fit_to_a_step("220").steps.size(), 1u);
}

TEST(CalibrateFrom, AStepAboveThePeakIsRefused) {
  expect_refusal([&] { fit_to_a_step("0.0001"); },
                 {"a.csv, line 2", "TFLOP/s", "peak of h100", "bf16", "seconds"});
  EXPECT_EQ(fit_to_a_step("16").steps.size(), 1u);
}

// What no device could hold was not measured so: without zero=3 in its row 70B on 64 devices is whole on
// each.
TEST(CalibrateFrom, StepsThatNoDeviceHoldsAreLeftOut) {
  Measurements m = read(
      "gpus,global-batch,seq-len,zero,recompute,micro-batch,seconds\n64,512,8192,0,full,1,60\n"
      "64,512,8192,3,full,1,60\n64,512,8192,3,none,2,60\n",
      "a.csv", "llama-3-70b");
  const std::vector<TooLargeStep> found =
      leave_out_too_large(load_software("torchtitan"), load_machine("h100"), m.steps);
  ASSERT_EQ(m.steps.size(), 1u);
  EXPECT_EQ(m.steps[0].where, "--from a.csv, line 3");
  ASSERT_EQ(found.size(), 2u);
  EXPECT_TRUE(found[0].is_left_out && found[1].is_left_out);
  for (const char* words :
       {"a.csv, line 2", " GB of 85.0 GB of h100", "left out", "zero, offload and the number"})
    EXPECT_NE(found[0].text.find(words), std::string::npos) << found[0].text;
  EXPECT_NE(found[1].text.find("recompute, offload, micro-batch and"), std::string::npos) << found[1].text;
  // Of a little more a device may have made room, and a count may be off.
  Machine small = load_machine("h100");
  m = read("gpus,global-batch,seq-len,zero,recompute,micro-batch,seconds\n64,512,8192,3,full,1,60\n", "a.csv",
           "llama-3-70b");
  small.memory_bytes = 40e9;
  const std::vector<TooLargeStep> close = leave_out_too_large(load_software("torchtitan"), small, m.steps);
  ASSERT_EQ(close.size(), 1u);
  EXPECT_FALSE(close[0].is_left_out) << close[0].text;
  EXPECT_EQ(m.steps.size(), 1u);
}

TEST(CalibrateFrom, TheMedianOfAnEvenNumberIsBetweenTheMiddleTwo) {
  std::string log = "# echelon: gpus=8 global-batch=64 micro-batch=1 seq-len=4096\n";
  for (const int ms : {9000, 8000, 1000, 4000, 2000, 3000})  // the first two warm up
    log += fmt::format(
        " [2025-01-01 00:00:00] iteration  1/ 20 | consumed samples: 64 | elapsed time per iteration "
        "(ms): {}.0 | global batch size: 64 | lm loss: 1.0\n",
        ms);
  EXPECT_DOUBLE_EQ(read(log, "a.log", "llama-3-8b").steps.at(0).seconds, 2.5);
}

TEST(CalibrateFrom, SaysHowColumnsOfProductsAreNamed) {
  expect_refusal([&] { read("M,N,K,time_us\n1,2,3,4\n", "a.csv"); },
                 {"a.csv", "has columns M, N, K", "m, n, k, one of seconds, ms, us, tflops"});
  expect_refusal([&] { read("m,n,k,time\n1,2,3,4\n", "a.csv"); },
                 {"column time is not known", "m, n, k, one of"});
}

TEST(CalibrateFrom, ReadsSteps) {
  const Measurements m = read(
      "# echelon: seq-len=4096 model=llama-2-7b\n"
      "gpus,tp,pp,micro_batch,global-batch,zero,recompute,precision,seconds\n"
      "16,2,2,1,64,1,full,bf16,6.5\n8,1,1,2,64,3,,fp8,9\n",
      "steps.csv");
  ASSERT_EQ(m.steps.size(), 2u);
  const Plan &first = m.steps[0].plan, &second = m.steps[1].plan;
  EXPECT_EQ(first.mesh.dp(), 4);
  EXPECT_EQ(first.mesh.tp(), 2);
  EXPECT_EQ(first.model.name, "llama-2-7b");
  EXPECT_EQ(first.seq_len, 4096);
  EXPECT_EQ(first.recompute, Recompute::full);
  EXPECT_EQ(second.zero, 3);
  EXPECT_EQ(second.mesh.dp(), 8);
  EXPECT_EQ(m.steps[1].precision, Precision::fp8);
  EXPECT_DOUBLE_EQ(m.steps[1].seconds, 9);
  const std::string head = "dp,global-batch,seq-len,seconds\n";
  EXPECT_EQ(read(head + "2,8,1024,1\n", "a.csv", "gpt2-124m").steps[0].plan.model.name, "gpt2-124m");
  expect_refusal([&] { read(head + "2,8,1024,1\n", "a.csv"); }, {"a.csv, line 2", "which model", "--model"});
  expect_refusal([&] { read(head + "2,,1024,1\n", "a.csv", "gpt2-124m"); }, {"line 2", "global-batch"});
  expect_refusal([&] { read(head + "two,8,1024,1\n", "a.csv", "gpt2-124m"); },
                 {"line 2, column 1", "dp", "two"});
  expect_refusal([&] { read(head + "2,8,1024,0\n", "a.csv", "gpt2-124m"); },
                 {"line 2, column 4", "seconds 0"});
  expect_refusal([&] { read("dp,tp,global-batch,seq-len,seconds\n1,5,8,1024,1\n", "a.csv", "gpt2-124m"); },
                 {"line 2", "12 heads"});
  expect_refusal([&] { read("tp,global-batch,seq-len,seconds\n2,8,1024,1\n", "a.csv", "gpt2-124m"); },
                 {"line 2", "how many devices", "gpus or dp"});
  expect_refusal(
      [&] { read("dp,colour,global-batch,seq-len,seconds\n2,3,8,1024,1\n", "a.csv", "gpt2-124m"); },
      {"line 2, column 2", "colour"});
  // What is written otherwise is what is refused, not that it is missing.
  expect_refusal([&] { read("GPUs,TP,global-batch,seq-len,seconds\n8,2,8,1024,1\n", "a.csv", "gpt2-124m"); },
                 {"line 2, column 1: GPUs is no field of a plan (did you mean gpus?)", "legal: gpus"});
  EXPECT_EQ(read(head + "2,8,1024,1\n  \n\t\n4,8,1024,1\n", "a.csv", "gpt2-124m").steps.size(), 2u);
  expect_refusal([&] { read("gpus,tp,global-batch,seq-len,seconds\n3,2,8,1024,1\n", "a.csv", "gpt2-124m"); },
                 {"column 1", "gpus 3"});
  for (const char* gpus : {"4294967296", "4294967304", "1000001", "0", "-8"})
    expect_refusal(
        [&] {
          read(fmt::format("gpus,global-batch,seq-len,seconds\n{},8,1024,1\n", gpus), "a.csv", "gpt2-124m");
        },
        {fmt::format("line 2, column 1: gpus {}: must be from 1 to 1000000", gpus)});
  for (const char* mesh : {"65536,65536", "1000000,1000000"})  // the products of which 32 bits do not hold
    expect_refusal(
        [&] {
          read(fmt::format("gpus,tp,pp,global-batch,seq-len,seconds\n8,{},8,1024,1\n", mesh), "a.csv",
               "gpt2-124m");
        },
        {"a.csv, line 2: ", "legal: up to 1000000"});
}

// The first line of a log that ends before its first step is no header of a table.
TEST(CalibrateFrom, NamesWhatIsReadForALogWithoutSteps) {
  expect_refusal(
      [] { read("using world size: 16, data-parallel size: 4\n  seq_length ......... 4096\n", "a.log"); },
      {"a.log: line 1: ", "nothing that is known",
       "a log of Megatron, torchtitan or nanotron with the time"});
}

TEST(CalibrateFrom, ReadsMegatronsLogs) {
  const std::string arguments =
      "using world size: 16, data-parallel size: 4\n"
      "------------------------ arguments ------------------------\n"
      "  context_parallel_size ........................... 1\n"
      "  global_batch_size ............................... 64\n"
      "  micro_batch_size ................................ 2\n"
      "  pipeline_model_parallel_size .................... 2\n"
      "  recompute_granularity ........................... full\n"
      "0:   seq_length ...................................... 4096  \n"
      "  sequence_parallel ............................... True\n"
      "[default0]:  tensor_model_parallel_size ...................... 2\n"
      "  use_distributed_optimizer ....................... True\n"
      "  virtual_pipeline_model_parallel_size ............ 4\n"
      "  world_size ...................................... 16\n";
  std::string lines;
  for (double ms : {9000.0, 6510.0, 6500.0, 6490.0})
    lines += fmt::format(
        " [2025-03-01 12:00:00] iteration        1/     100 | consumed samples:           64 | elapsed time "
        "per iteration "
        "(ms): {:.1f} | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.0E-04 | global batch "
        "size:    64 |\n",
        ms);
  const Measurements m = read(arguments + lines, "megatron.log", "llama-2-7b");
  ASSERT_EQ(m.steps.size(), 1u);
  const Plan& plan = m.steps[0].plan;
  EXPECT_DOUBLE_EQ(m.steps[0].seconds, 6.5);  // the first one warms up
  EXPECT_EQ(plan.mesh.dp(), 4);
  EXPECT_EQ(plan.mesh.pp(), 2);
  EXPECT_EQ(plan.schedule, "interleaved");
  EXPECT_EQ(plan.chunks, 4);
  EXPECT_EQ(plan.zero, 1);
  EXPECT_EQ(plan.micro_batch, 2);
  EXPECT_TRUE(plan.shards_sequence());
  EXPECT_EQ(plan.recompute, Recompute::full);
  // What a run has cut while it wrote its last number is no step, but may be one if more follows.
  const std::string next = " [2025-03-01 12:00:00] iteration | elapsed time per iteration (ms): ";
  for (const char* number : {"6", "6493.", "6493", ""})
    EXPECT_DOUBLE_EQ(read(arguments + lines + next + number, "megatron.log", "llama-2-7b").steps[0].seconds,
                     6.5);
  for (const char* whole : {"6480 ", "6480\n"})
    EXPECT_DOUBLE_EQ(read(arguments + lines + next + whole, "megatron.log", "llama-2-7b").steps[0].seconds,
                     6.49);
  expect_refusal([&] { read(lines, "megatron.log", "llama-2-7b"); },
                 {"megatron.log", "does not say global-batch"});
  expect_refusal(
      [&] { read(arguments + "elapsed time per iteration (ms): soon |\n", "megatron.log", "llama-2-7b"); },
      {"megatron.log, line 14, column 34", "no number behind"});
}

// What a plan has is mapped; what none has is refused by its name, unless a remark says what comes nearest.
TEST(CalibrateFrom, ReadsMegatronsArguments) {
  using Arguments = std::map<std::string, std::string>;
  const auto log = [](const Arguments& more) {
    Arguments all{{"tensor_model_parallel_size", "2"},
                  {"pipeline_model_parallel_size", "1"},
                  {"context_parallel_size", "1"},
                  {"micro_batch_size", "1"},
                  {"global_batch_size", "512"},
                  {"seq_length", "8192"},
                  {"world_size", "64"},
                  {"sequence_parallel", "True"},
                  {"use_distributed_optimizer", "True"},
                  {"bf16", "True"},
                  {"num_layers", "32"}};
    for (const auto& [key, value] : more) all[key] = value;
    std::string text;
    for (const auto& [key, value] : all) text += fmt::format("  {} ...... {}\n", key, value);
    return text + " iteration 1/ 100 | elapsed time per iteration (ms): 5000.0 |\n";
  };
  const auto step = [&](const Arguments& more) {
    return read(log(more), "megatron.log", "llama-3-8b").steps.at(0);
  };
  EXPECT_EQ(step({}).precision, Precision::bf16);
  EXPECT_EQ(step({{"fp4", "e2m1"}}).precision, Precision::fp4);
  EXPECT_EQ(step({{"fp8", "hybrid"}}).precision, Precision::fp8);
  EXPECT_EQ(step({{"bf16", "False"}, {"fp16", "False"}}).precision, Precision::f32);
  EXPECT_EQ(step({{"bf16", "False"}, {"fp16", "True"}}).precision, Precision::bf16);
  const Arguments selective{{"recompute_granularity", "selective"}};
  const auto recomputed = [&](const char* modules) {
    Arguments all = selective;
    all["recompute_modules"] = modules;
    return step(all).plan.recompute;
  };
  EXPECT_EQ(step(selective).plan.recompute, Recompute::selective);
  EXPECT_EQ(recomputed("['core_attn']"), Recompute::selective);
  EXPECT_EQ(recomputed("['mlp']"), parse_recompute("mlp", ""));
  expect_refusal([&] { recomputed("['mlp', 'layernorm']"); },
                 {"megatron.log, line", "recompute_modules ['mlp', 'layernorm']", "# echelon: recompute="});
  expect_refusal(
      [&] {
        step({{"recompute_granularity", "full"}, {"recompute_method", "block"}});
      },
      {"recompute_method block"});
  for (const auto& [strategy, zero] :
       {std::pair{"no_shard", 0}, {"optim", 1}, {"optim_grads", 2}, {"optim_grads_params", 3}})
    EXPECT_EQ(step({{"use_megatron_fsdp", "True"}, {"data_parallel_sharding_strategy", strategy}}).plan.zero,
              zero);
  EXPECT_EQ(step({{"use_torch_fsdp2", "True"}, {"torch_fsdp2_reshard_after_forward", "False"}}).plan.zero, 2);
  EXPECT_EQ(step({{"num_distributed_optimizer_instances", "2"}}).plan.hsdp, 2);
  for (const auto& [kind, meant] : {std::pair{"['p2p']", ContextKind::ring},
                                    {"['a2a']", ContextKind::ulysses},
                                    {"['all_gather']", ContextKind::allgather}})
    EXPECT_EQ(step({{"context_parallel_size", "4"}, {"cp_comm_type", kind}}).plan.context_kind, meant)
        << kind;
  const Arguments both_kinds{{"context_parallel_size", "4"}, {"cp_comm_type", "['a2a+p2p']"}};
  expect_refusal([&] { step(both_kinds); }, {"cp_comm_type ['a2a+p2p']", "cp-kind"});
  EXPECT_EQ(read("# echelon: cp-kind=ulysses\n" + log(both_kinds), "megatron.log", "llama-3-8b")
                .steps.at(0)
                .plan.context_kind,
            ContextKind::ulysses);
  EXPECT_EQ(step({{"optimizer_cpu_offload", "True"}, {"optimizer_offload_fraction", "1.0"}}).plan.offload,
            Offload::optimizer);
  EXPECT_EQ(step({{"cpu_offloading_num_layers", "31"}}).plan.offload, Offload::activations);
  expect_refusal([&] { step({{"cpu_offloading_num_layers", "8"}}); }, {"cpu_offloading_num_layers 8"});
  expect_refusal(
      [&] {
        step({{"optimizer_cpu_offload", "True"}, {"optimizer_offload_fraction", "0.5"}});
      },
      {"optimizer_offload_fraction 0.5"});
  const auto laid_out = [&](const char* layout) {
    return step({{"pipeline_model_parallel_size", "2"}, {"pipeline_model_parallel_layout", layout}}).plan;
  };
  EXPECT_EQ(laid_out("Et*20|t*12L").layers_per_stage, (std::vector<std::int64_t>{20, 12}));
  const Plan chunked = laid_out("Et*8|(tttt,tttt|)*2,t*8L");
  EXPECT_EQ(chunked.layers_per_stage, (std::vector<std::int64_t>{8, 8, 8, 8}));
  EXPECT_EQ(chunked.schedule, "interleaved");
  EXPECT_EQ(chunked.chunks, 2);
  for (const std::string& long_one : {std::string(1'000'000, 't'), "(" + std::string(1'000'000, 't') + ")*2",
                                      std::string("(t*99999)*99999"), std::string(1'000'000, '1')})
    expect_refusal([&] { laid_out(long_one.c_str()); }, {"pipeline_model_parallel_layout"});
  expect_refusal([&] { read(std::string(1'000'000, '1') + ": #", "a.csv"); }, {"a.csv"});
  expect_refusal([&] { laid_out("Et*20|x*12L"); }, {"pipeline_model_parallel_layout", "layers-per-stage"});
  expect_refusal(
      [&] {
        step({{"pipeline_model_parallel_size", "2"}, {"decoder_first_pipeline_num_layers", "20"}});
      },
      {"decoder_first_pipeline_num_layers 20"});
}

std::string megatron_log(const std::map<std::string, std::string>& more, const std::vector<int>& batches) {
  std::map<std::string, std::string> all{{"tensor_model_parallel_size", "2"},
                                         {"pipeline_model_parallel_size", "1"},
                                         {"micro_batch_size", "1"},
                                         {"global_batch_size", "512"},
                                         {"seq_length", "8192"},
                                         {"world_size", "64"}};
  for (const auto& [key, value] : more) all[key] = value;
  std::string text;
  for (const auto& [key, value] : all) text += fmt::format("  {} ...... {}\n", key, value);
  for (const int batch : batches)
    text +=
        fmt::format(" iteration 1/ 100 | elapsed time per iteration (ms): {}.0 | global batch size: {:5} |\n",
                    10 * batch, batch);
  return text;
}

// rampup_batch_size: steps of fewer sequences come first.
TEST(CalibrateFrom, TakesTheStepsOfTheWholeBatch) {
  const auto seconds = [](const std::vector<int>& batches) {
    return read(megatron_log({}, batches), "megatron.log", "llama-3-8b").steps.at(0).seconds;
  };
  EXPECT_DOUBLE_EQ(seconds({64, 64, 64, 128, 128, 512, 512, 512}), 5.12);
  expect_refusal(
      [&] {
        seconds({64, 64, 128});
      },
      {"megatron.log", "no iteration has the global batch size of 512", "line 1", "128"});
}

TEST(CalibrateFrom, RefusesLogsOfTwoRunsAndOfOtherModels) {
  const auto both = [](const std::map<std::string, std::string>& other) {
    return read(megatron_log({}, {512}) + megatron_log(other, {512}), "megatron.log", "llama-3-8b")
        .steps.size();
  };
  EXPECT_EQ(both({}), 1u);  // it went on
  EXPECT_EQ(both({{"load", "checkpoints"}}), 1u);
  expect_refusal(
      [&] {
        both({{"world_size", "32"}});
      },
      {"megatron.log, line 13", "world_size 32 is 64 on line 6", "two runs"});
  using Case = std::tuple<const char*, const char*, const char*>;
  for (const auto& [key, has, other] :
       {Case{"num_layers", "32", "80"}, Case{"hidden_size", "4096", "8192"},
        Case{"num_attention_heads", "32", "64"}, Case{"ffn_hidden_size", "14336", "28672"},
        Case{"num_query_groups", "8", "4"}}) {
    const auto step = [&, key = key](const char* size) {
      return read(megatron_log({{key, size}, {"group_query_attention", "True"}}, {512}), "megatron.log",
                  "llama-3-8b");
    };
    EXPECT_EQ(step(has).steps.size(), 1u) << key;
    expect_refusal([&, other = other] { step(other); }, {"megatron.log, line", std::string(key) + " " + other,
                                                         std::string(has) + " of llama-3-8b"});
  }
}

TEST(CalibrateFrom, ReadsMegatronsOlderArguments) {
  const auto plan = [](const std::map<std::string, std::string>& more) {
    return read(megatron_log(more, {512}), "megatron.log", "llama-3-8b").steps.at(0).plan;
  };
  EXPECT_EQ(
      plan({{"use_custom_fsdp", "True"}, {"data_parallel_sharding_strategy", "optim_grads_params"}}).zero, 3);
  EXPECT_EQ(plan({{"checkpoint_activations", "True"}}).recompute, Recompute::full);
  EXPECT_EQ(plan({{"checkpoint_activations", "False"}}).recompute, Recompute::none);
  EXPECT_EQ(
      plan({{"checkpoint_activations", "True"}, {"activations_checkpoint_method", "uniform"}}).recompute,
      Recompute::full);
  expect_refusal(
      [&] {
        plan({{"activations_checkpoint_method", "block"}});
      },
      {"activations_checkpoint_method block", "# echelon: recompute="});
  expect_refusal(
      [&] {
        plan({{"attention_backend", "AttnBackend.unfused"}});
      },
      {"megatron.log, line 1", "AttnBackend.unfused", "legal: auto, flash, fused"});
  EXPECT_EQ(plan({{"attention_backend", "AttnBackend.flash"}}).mesh.tp(), 2);
}

// Until the middle of 2025 it named the axes of several ranks alone.
TEST(CalibrateFrom, ReadsTorchtitansOlderMeshes) {
  const auto plan = [](const std::string& mesh) {
    return read(mesh +
                    "local batch size 2, global batch size 128, gradient accumulation steps 1, sequence "
                    "length 8192\n"
                    "step:  1  loss: 12.2  tps: 7,000  tflops: 400.0\n",
                "titan.log", "llama-3-8b")
        .steps.at(0)
        .plan;
  };
  const Plan sharded = plan("Building 1-D device mesh with ['dp_shard'], [64]\n");
  EXPECT_EQ(sharded.mesh.dp(), 64);
  EXPECT_EQ(sharded.mesh.num_ranks(), 64);
  EXPECT_EQ(sharded.zero, 3);
  const Plan cut = plan("Building 3-D device mesh with ['dp_replicate', 'dp_shard', 'tp'], [2, 8, 4]\n");
  EXPECT_EQ(cut.mesh.dp(), 16);
  EXPECT_EQ(cut.mesh.tp(), 4);
  EXPECT_EQ(cut.hsdp, 2);
  expect_refusal([&] { plan("Building 1-D device mesh with ['dp'], [64]\n"); },
                 {"titan.log, line 1", "['dp'], [64] is not priced", "# echelon: dp="});
  EXPECT_EQ(plan("# echelon: dp=64 zero=3\nBuilding 1-D device mesh with ['dp'], [64]\n").mesh.dp(), 64);
  expect_refusal([&] { plan("Building 2-D device mesh with ['dp_shard', 'tp'\n"); }, {"titan.log, line 1"});
  expect_refusal([&] { plan(""); }, {"titan.log", "how many devices", "# echelon: gpus="});
}

TEST(CalibrateFrom, ReadsTorchtitansPipelinesAndPrecisions) {
  const auto log = [](const char* schedule, int accumulation, const char* more) {
    return fmt::format(
        "Building device mesh with parallelism: pp=4, dp_replicate=1, dp_shard=16, cp=1, tp=1, ep=1, "
        "etp=1\n{}"
        "Using pipeline schedule {} with 16 microbatches and 8 stages.\n"
        "Trainer is initialized with local batch size 32, global batch size {}, gradient accumulation steps "
        "{}, "
        "sequence length 8192, total steps 100 (warmup 2)\nstep:  1  loss: 12.2  tps: 7,000  tflops: 400.0\n",
        more, schedule, 512 * accumulation, accumulation);
  };
  const auto step = [](const std::string& text) { return read(text, "titan.log", "llama-3-8b").steps.at(0); };
  const MeasuredStep plain = step(log("Interleaved1F1B", 1, ""));
  EXPECT_EQ(plain.plan.micro_batch, 2);
  EXPECT_EQ(plain.plan.schedule, "interleaved");
  EXPECT_EQ(plain.plan.chunks, 2);
  EXPECT_EQ(plain.precision, Precision::bf16);
  EXPECT_EQ(step(log("ZBVZeroBubble", 1, "")).plan.schedule, "zb-v");
  for (const char* scaled :
       {"Float8 tensorwise scaled training active\n", "Float8 training active with recipe rowwise\n",
        "MX training active with recipe mxfp8_cublas\n"})
    EXPECT_EQ(step(log("Interleaved1F1B", 1, scaled)).precision, Precision::fp8) << scaled;
  expect_refusal([&] { step(log("PipelineScheduleMulti", 1, "")); },
                 {"titan.log, line 2", "PipelineScheduleMulti", "# echelon: schedule="});
  expect_refusal([&] { step(log("Interleaved1F1B", 2, "")); }, {"gradient accumulation steps 2", "legal: 1"});
}

TEST(CalibrateFrom, ReadsTorchtitansLogs) {
  const std::string log =
      "[rank0]:[titan] 2025-02-01 00:00:00,000 - root - INFO - Building device mesh with parallelism: pp=1, "
      "dp_replicate=2, dp_shard=4, cp=1, tp=2, ep=1, etp=1\n"
      "[titan] 2025-02-01 00:00:00,000 - root - INFO - Applied full activation checkpointing to the model\n"
      "[titan] 2025-02-01 00:00:00,000 - root - INFO - Trainer is initialized with local batch size 2, "
      "global batch size "
      "16, gradient accumulation steps 1, sequence length 8192, total steps 100 (warmup 2)\n"
      "[titan] 2025-02-01 00:00:01,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2  "
      "\x1b[38;2;54;234;195mmemory: "
      "40.1GiB(42.0%)  \x1b[34mtps: 512  \x1b[36mtflops: 20.0\n"
      "[titan] - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  9.1  \x1b[34mtps: 4,096  \x1b[36mtflops: "
      "190.0\x1b[39m\n"
      "[titan] - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  9.1  \x1b[34mtps: 4,096  \x1b[36mtflops: "
      "190.0\x1b[39m\n";
  const Measurements m = read(log, "titan.log", "llama-3-8b");
  ASSERT_EQ(m.steps.size(), 1u);
  const Plan& plan = m.steps[0].plan;
  EXPECT_EQ(plan.mesh.dp(), 8);
  EXPECT_EQ(plan.hsdp, 2);
  EXPECT_EQ(plan.zero, 3);
  EXPECT_EQ(plan.mesh.tp(), 2);
  EXPECT_EQ(plan.recompute, Recompute::full);
  EXPECT_NEAR(m.steps[0].seconds, 16.0 * 8192 / (4096 * 16), 1e-12);
}

TEST(CalibrateFrom, ReadsNanotronsLogs) {
  const std::string log =
      "# echelon: zero=1\n"
      "Config(general=GeneralArgs(project='bench',\n"
      "       parallelism=ParallelismArgs(expert_dp=8,\n dp=4,\n                                   pp=2,\n   "
      "               "
      "                 "
      "tp=2,\n"
      "       tokens=TokensArgs(sequence_length=4096,\n                         micro_batch_size=2,\n"
      "                         batch_accumulation_per_replica=8,\n"
      "iteration: 1 / 20 | consumed_tokens: 262K | elapsed_time_per_iteration_ms: 9.8K | tokens_per_sec: "
      "26.7K | "
      "lm_loss: 11\n"
      "iteration: 2 / 20 | consumed_tokens: 524K | elapsed_time_per_iteration_ms: 2.52K | tokens_per_sec: "
      "104K | "
      "lm_loss: 9\n";
  const Measurements m = read(log, "nanotron.log", "llama-2-7b");
  ASSERT_EQ(m.steps.size(), 1u);
  const Plan& plan = m.steps[0].plan;
  EXPECT_DOUBLE_EQ(m.steps[0].seconds, 2.52);
  EXPECT_EQ(plan.mesh.num_ranks(), 16);
  EXPECT_EQ(plan.global_batch, 4 * 2 * 8);
  EXPECT_EQ(plan.zero, 1);
}

TEST(CalibrateFrom, ReadsNanotronsChoices) {
  const auto plan = [](const std::string& more) {
    return read("Config(parallelism=ParallelismArgs(dp=4,\n pp=2,\n tp=2,\n" + more +
                    "tokens=TokensArgs(sequence_length=4096, micro_batch_size=2, "
                    "batch_accumulation_per_replica=8\n"
                    "iteration: 2 / 20 | elapsed_time_per_iteration_ms: 2.52K | lm_loss: 9\n",
                "nanotron.log", "llama-2-7b")
        .steps.at(0)
        .plan;
  };
  const Plan plain = plan(
      " pp_engine=<nanotron.parallel.pipeline_parallel.engine.OneForwardOneBackwardPipelineEngine object>,\n"
      " tp_mode=<TensorParallelLinearMode.REDUCE_SCATTER: 2>,\n recompute_layer=False,\n"
      " context_parallel_size=1,\n expert_parallel_size=1),\n"
      " model_config=LlamaConfig(hidden_size=4096, num_hidden_layers=32)\n");
  EXPECT_EQ(plain.schedule, "1f1b");
  EXPECT_TRUE(plain.shards_sequence());
  EXPECT_EQ(plain.recompute, Recompute::none);
  EXPECT_EQ(plan(" recompute_layer=True,\n").recompute, Recompute::full);
  EXPECT_FALSE(plan(" tp_mode=<TensorParallelLinearMode.ALL_REDUCE: 1>,\n").shards_sequence());
  EXPECT_EQ(plan(" pp_engine=<nanotron...engine.AllForwardAllBackwardPipelineEngine object>,\n").schedule,
            "gpipe");
  expect_refusal([&] { plan(" context_parallel_size=2,\n"); },
                 {"nanotron.log, line 4", "context_parallel_size=2", "# echelon: cp="});
  expect_refusal([&] { plan(" moe_layer_recompute=True,\n"); }, {"moe_layer_recompute=True", "recompute="});
  expect_refusal([&] { plan(" LlamaConfig(hidden_size=8192, num_hidden_layers=32)\n"); },
                 {"nanotron.log, line 4", "hidden_size 8192 is not the 4096 of llama-2-7b"});
}

// exp(u) scales a line; 40 measurements, of which two are broken.
TEST(CalibrateFrom, BrokenRunsDoNotPull) {
  const Residuals residuals = [](const std::vector<double>& u) {
    std::vector<double> r;
    for (int i = 0; i < 40; ++i) {
      const double x = 1 + i, measured = (3 + 0.2 * x) * (i == 7 || i == 20 ? 3 : 1);
      r.push_back(std::log((1.5 * std::exp(u[0]) + 0.4 * std::exp(u[1]) * x) / measured));
    }
    return r;
  };
  const std::vector<double> u = most_likely(residuals, 2, 0.01);
  EXPECT_NEAR(1.5 * std::exp(u[0]), 3, 0.05);
  EXPECT_NEAR(0.4 * std::exp(u[1]), 0.2, 0.005);
  // Of what nothing depends on nothing is learnt.
  EXPECT_EQ(most_likely([](const std::vector<double>&) { return std::vector<double>{0.5}; }, 1, 0.1)[0], 0);
}

// Two numbers, a standard deviation of 0.5 each. The first three steps depend on one of them, the last on the
// other: whoever has measured the first knows nearly all of its like.
TEST(CalibrateFrom, ChoosesTheStepsThatTellMost) {
  const std::vector<Knob> knobs{{"product_efficiency", &Software::product_efficiency, 0.01, 100, 1, 0.5},
                                {"elementwise_passes", &Software::elementwise_passes, 0.01, 100, 1, 0.5}};
  const StepErrors logs = [](const Software& s) {
    const double product = std::log(s.product_efficiency), pass = std::log(s.elementwise_passes);
    return std::vector{-product, -product, -0.9 * product, 0.4 * pass};
  };
  Software start;
  start.product_efficiency = start.elementwise_passes = 1;
  const double of_first = 0.25, of_last = 0.04, off = 0.08 * 0.08;
  const StepChoice choice = most_telling_steps(start, knobs, logs, {}, 2);
  EXPECT_NEAR(choice.uncertain, std::sqrt((2.81 * of_first + of_last) / 4), 1e-12);
  ASSERT_EQ(choice.steps.size(), 2u);
  EXPECT_EQ(choice.steps[0].step, 0u);
  const double left = of_first - of_first * of_first / (of_first + off);
  EXPECT_NEAR(choice.steps[0].uncertain, std::sqrt((2.81 * left + of_last) / 4), 1e-12);
  EXPECT_EQ(choice.steps[1].step, 3u);
  // What is measured already is not asked for again, and no more than there are.
  const StepChoice after = most_telling_steps(start, knobs, logs, {0}, 9);
  EXPECT_NEAR(after.uncertain, choice.steps[0].uncertain, 1e-12);
  ASSERT_EQ(after.steps.size(), 3u);
  EXPECT_EQ(after.steps[0].step, 3u);
}

// Steps of a program whose numbers are known: the fit prices others of its steps as it does.
TEST(CalibrateFrom, FindsAProgramsNumbers) {  // long
  Software truth = load_software("current");
  truth.product_efficiency = 0.8;
  truth.elementwise_passes = 2.5;
  truth.network_efficiency = 0.6;
  const Machine machine = load_machine("h100");
  std::vector<MeasuredStep> steps;
  for (const auto& [dp, tp, pp, micro] :
       {std::array{64, 1, 1, 1}, {8, 8, 1, 1}, {16, 2, 2, 1}, {16, 4, 1, 2}, {4, 4, 4, 1}, {32, 2, 1, 4}}) {
    MeasuredStep step;
    step.plan = checks::searched_plan();
    step.plan.model = load_model("llama-3-8b");
    step.plan.seq_len = 4096, step.plan.global_batch = 256;
    step.plan.mesh.set(Axis::dp, dp), step.plan.mesh.set(Axis::tp, tp), step.plan.mesh.set(Axis::pp, pp);
    step.plan.micro_batch = micro;
    step.plan.zero = 1;
    step.where = "made";
    step.seconds = priced_seconds(truth, machine, step);
    steps.push_back(step);
  }
  const std::vector<MeasuredStep> three(steps.begin(), steps.begin() + 3);
  const std::vector<Knob> knobs = usual_numbers();
  Software start = load_software("current");
  start.measured_on = {{"b200 bf16"}};
  start.measured_gpus = {{8, 16}};
  const SoftwareFit few = fit_software(start, knobs, machine, three),
                    all = fit_software(start, knobs, machine, steps);
  EXPECT_EQ(few.steps.size(), 3u);
  EXPECT_FALSE(few.steps[0].left_out_seconds);
  EXPECT_EQ(few.software.low, start.low);
  EXPECT_GT(mean_error(all.steps, &FitRow::before_seconds), 0.15);
  // A step counts as 8% off, and what is usual holds the numbers back: of six exact steps less than half of
  // that is left.
  EXPECT_LT(mean_error(all.steps, &FitRow::fitted_seconds), 0.04);
  EXPECT_TRUE(all.steps[0].left_out_seconds);
  // Plans like these are not far from what was measured any more.
  EXPECT_EQ(few.software.measured_on, start.measured_on);
  EXPECT_EQ(all.software.measured_on, (std::vector<std::string>{"b200 bf16", "h100 bf16"}));
  EXPECT_EQ(all.software.measured_gpus, (std::vector<std::int64_t>{8, 64}));
  EXPECT_LE(all.software.far_low, all.software.low);
  EXPECT_GE(all.software.far_high, all.software.high);
  EXPECT_LT(mean_left_out_error(all.steps), 0.05);
  for (std::size_t i = 3; i < steps.size(); ++i)
    EXPECT_NEAR(priced_seconds(few.software, machine, steps[i]) / steps[i].seconds, 1, 0.08) << i;
  EXPECT_LE(all.software.low, start.low);
}

// vTrain's all-reduces inside a node of eight A100, and SimuMax's products: as files, beginning with another
// machine.
TEST(CalibrateFrom, PublishedTablesOfA100) {  // long
  const auto links = published::find("vtrain_nccl_allreduce_lut.csv"),
             operators = published::find("simumax_operator_efficiency.csv");
  if (!links || !operators) GTEST_SKIP() << "the tables are not there; set ECHELON_PUBLISHED to their folder";
  std::map<int, std::string> files;
  std::size_t row = 0;
  for (const published::CsvRow& r : published::read_csv(*links)) {
    if (r.at("gpu") != "A100" || row++ % 13 != 0) continue;  // 1024 sizes are more than a person measures
    const int ranks = published::whole(r, "ranks");
    std::string& text = files[ranks];
    if (text.empty()) {
      for (int rank = 0; rank < ranks; ++rank)
        text += fmt::format("#  Rank {} Group  0 Pid {} on node01 device {} [0x07] NVIDIA A100\n", rank, rank,
                            rank);
      text += "# size count type redop root time algbw busbw #wrong\n";
    }
    text += fmt::format("{} 0 float sum -1 {} 0 0 0\n", r.at("size_bytes"), r.at("out_of_place_time_us"));
  }
  Measurements m;
  for (const auto& [ranks, text] : files) read_measurements(text, "all_reduce.txt", "", m);
  ASSERT_GT(m.collectives.size(), 70u);
  std::string table = "m,n,k,batch,tflops\n";
  for (const published::CsvRow& r : published::read_csv(*operators)) {
    if (r.at("gpu") != "A100-PCIe" || r.at("op") != "matmul") continue;
    const std::string shape = " " + r.at("shape");
    const auto field = [&](const std::string& key) {
      return std::stod(shape.substr(shape.find(" " + key + "=") + key.size() + 2));
    };
    table += fmt::format(
        "{},{},{},{},{}\n", field("m"), field("n"), field("k"), field("b"),
        published::number(r, "peak_tflops") * published::number(r, "efficiency_fraction_of_peak"));
  }
  read_measurements(table, "gemm.csv", "", m);
  ASSERT_EQ(m.products.size(), 183u);
  Machine start = load_machine("h100");
  start.peak_flops = load_machine("a100-80").peak_flops;
  start.cores = load_machine("a100-80").cores;
  const MachineFit fit = fit_machine(start, m.products, m.collectives);
  fmt::print(
      "A100 from files, beginning as an H100: {} all-reduces {:.1f}% off, {:.1f}% at sizes left out; {} "
      "products {:.1f}%, "
      "{:.1f}% at shapes left out\n",
      m.collectives.size(), 100 * mean_error(fit.collectives, &FitRow::fitted_seconds),
      100 * mean_left_out_error(fit.collectives), m.products.size(),
      100 * mean_error(fit.products, &FitRow::fitted_seconds), 100 * mean_left_out_error(fit.products));
  EXPECT_LT(mean_error(fit.collectives, &FitRow::fitted_seconds), 0.06);
  EXPECT_LT(mean_left_out_error(fit.collectives), 0.06);
  EXPECT_LT(mean_error(fit.products, &FitRow::fitted_seconds), 0.04);
  EXPECT_LT(mean_left_out_error(fit.products), 0.04);
}

class CalibrateCommand : public checks::VerbTest {
 protected:
  CalibrateCommand() : VerbTest("calibrate") {}
};

// A build that only plans fits too; it has nothing to measure with, and says so.
TEST_F(CalibrateCommand, FitsInAnyBuild) {  // long
  write("steps.csv",
        "# echelon: model=llama-3-8b seq-len=8192 global-batch=128 zero=3 recompute=full\n"
        "gpus,tp,micro-batch,seconds\n8,1,1,21.9\n16,1,2,11.1\n16,2,1,12.3\n32,4,2,7.0\n");
  const auto fitted =
      run("--from steps.csv --machine h100 --software torchtitan --software-out mine.toml 2>&1");
  EXPECT_EQ(fitted.status, 0) << fitted.output;
  EXPECT_NE(software_from_toml(read("mine.toml"), "mine.toml").elementwise_passes, 1);
  refused("--from steps.csv ./steps.csv --machine h100 --software torchtitan",
          {"./steps.csv", "given twice"});
  write("wanted.csv",
        "# echelon: model=llama-3-8b seq-len=8192 global-batch=128 zero=3 recompute=full\n"
        "gpus,tp,micro-batch,seconds\n8,1,1,21.9\n16,1,2,\n16,2,1,\n32,8,1,\n");
  const auto told = run("--from wanted.csv --software torchtitan --choose 2");
  EXPECT_EQ(told.status, 0) << told.output;
  EXPECT_NE(told.output.find("wanted.csv, line 6: dp 4 tp 8"), std::string::npos) << told.output;
  refused("--from wanted.csv --software torchtitan", {"wanted.csv, line 4", "seconds is empty", "--choose"});
  refused("--from wanted.csv --software torchtitan --choose 4", {"--choose 4", "3 steps"});
  refused("--from wanted.csv --software torchtitan --choose 0", {"--choose 0", "at least 1"});
  if (!has_cpu_kernels()) refused("", {"no kernels to measure with", "legal: --from FILE"});
}

}  // namespace
}  // namespace echelon::calibrate_from_test
