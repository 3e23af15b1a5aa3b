// `calibrate --from`: fits a machine and a program to measurements from elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct CalibrateFromFlags {
  std::vector<std::string> from;
  std::string machine = "h100", software = "current", model, out, software_out;
  std::int64_t choose = 0;
  bool gives_software = false, gives_model = false;
  bool json = false;
};

int run_calibrate_from(const CalibrateFromFlags& flags);

}  // namespace echelon
