#include "published/tables.h"

#include <cstdlib>

#include "published/sources.h"

namespace echelon::published {

std::optional<std::filesystem::path> find(const std::string& file) {
  const char* given = std::getenv("ECHELON_PUBLISHED");
  for (const std::filesystem::path& place :
       {std::filesystem::path(ECHELON_SOURCE_DIR "/tests/published"),
        std::filesystem::path(given != nullptr ? given : ECHELON_SOURCE_DIR "/../shared/published")}) {
    std::error_code error;
    if (std::filesystem::is_regular_file(place / file, error)) return place / file;
  }
  return {};
}

const std::vector<Source>& sources() {
  static const std::vector<Source> list{
      {"sc21-table1", "megatron_sc21_table1.csv", sc21},
      {"sc21-table2", "megatron_sc21_table2_vs_zero3.csv", sc21_table2},
      {"sc21-zero3", "megatron_sc21_table2_vs_zero3.csv", sc21_zero3},
      {"korthikanti", "korthikanti_2022_iteration_time.csv", korthikanti},
      {"zero-bubble", "zero_bubble_throughput_memory.csv", zero_bubble},
      {"torchtitan", "torchtitan_llama3.csv", torchtitan},
      {"llm-foundry", "llm_foundry_mpt.csv", llm_foundry},
      {"vtrain-multinode", "vtrain_multinode.csv", vtrain_multi},
      {"vtrain-singlenode", "vtrain_singlenode.csv", vtrain_single},
      {"nanotron", "nanotron_ultrascale_bench.csv", nanotron},
      {"bridge-dense", "megatron_bridge_performance_summary.csv", bridge_dense},
      {"bridge-experts", "megatron_bridge_performance_summary.csv", bridge_experts},
      {"bridge-hybrid", "megatron_bridge_performance_summary.csv", bridge_hybrid},
      {"nemo-2407", "nemo_2407_h100_fp8.csv", nemo},
      {"llama3-405b", "llama3_405b_table4.csv", llama3},
      {"deepseek-v3", "deepseek_v3_training.csv", deepseek},
  };
  return list;
}

std::optional<Table> read(const Source& source) {
  const auto path = find(source.file);
  if (!path) return {};
  return source.read(path->string());
}

}  // namespace echelon::published
