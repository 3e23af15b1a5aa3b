// How each published table is read.
#pragma once

#include <string>

#include "published/tables.h"

namespace echelon::published {

Table sc21(const std::string& path);
Table sc21_table2(const std::string& path);
Table sc21_zero3(const std::string& path);
Table korthikanti(const std::string& path);
Table zero_bubble(const std::string& path);
Table torchtitan(const std::string& path);
Table llm_foundry(const std::string& path);
Table vtrain_multi(const std::string& path);
Table vtrain_single(const std::string& path);
Table nanotron(const std::string& path);
Table bridge_dense(const std::string& path);
Table bridge_experts(const std::string& path);
Table bridge_hybrid(const std::string& path);
Table nemo(const std::string& path);
Table llama3(const std::string& path);
Table deepseek(const std::string& path);

}  // namespace echelon::published
