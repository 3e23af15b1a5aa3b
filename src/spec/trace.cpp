#include "spec/trace.h"

namespace echelon {

const char* activity_name(Activity activity) {
  switch (activity) {
    case Activity::step:
      return "step";
    case Activity::load_data:
      return "load data";
    case Activity::attention_forward:
      return "attention";
    case Activity::attention_backward:
      return "attention backward";
    case Activity::reduce_gradients:
      return "reduce gradients";
    case Activity::gradient_norm:
      return "gradient norm";
    case Activity::optimizer:
      return "optimizer";
    case Activity::share_parameters:
      return "share parameters";
    case Activity::count_routing:
      return "count routing";
    case Activity::meet:
      return "meet all ranks";
    case Activity::validation:
      return "validation";
    case Activity::checkpoint_copy:
      return "copy checkpoint";
    case Activity::checkpoint_wait:
      return "wait for checkpoint";
    case Activity::fingerprint:
      return "copy for fingerprint";
    case Activity::checkpoint_commit:
      return "commit checkpoint";
    case Activity::straggle:
      return "straggle";
    case Activity::keys_arriving:
      return "keys arriving";
    case Activity::checkpoint_write:
      return "write checkpoint";
  }
  return "?";
}

}  // namespace echelon
