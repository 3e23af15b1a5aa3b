#include "tensor/simd.h"

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {

// Each is defined in the file that simd.h names.
template <class T>
const ElementSimd<T>& element_simd();
template <class T>
const ShortConvolutionSimd<T>& short_convolution_simd();
template <class T>
const NormSimd<T>& norm_simd();
template <class T>
const ActivationSimd<T>& activation_simd();
template <class T>
const SoftmaxSimd<T>& softmax_simd();
const LogitsSimd& logits_simd();
const UpdateSimd& update_simd();

// Put together when first asked for: only then is it known that the processor has these instructions.
template <class T>
const Simd<T>* all_passes() {
  static const Simd<T> all{element_simd<T>(), short_convolution_simd<T>(), norm_simd<T>(),
                           activation_simd<T>(), softmax_simd<T>()};
  return &all;
}

const Simd<float>* f32_passes() { return all_passes<float>(); }
const Simd<bf16>* bf16_passes() { return all_passes<bf16>(); }
const WideSimd* passes_on_wide() {
  static const WideSimd all{logits_simd(), update_simd()};
  return &all;
}

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace echelon {

void on_each_instruction_set(const std::function<void(const char*)>& body) {
  const auto choose = [](std::int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    choose(target);
    body(hwy::TargetName(target));
  }
  choose(0);
}

HWY_EXPORT(f32_passes);
HWY_EXPORT(bf16_passes);
HWY_EXPORT(passes_on_wide);

template <>
const Simd<float>& simd<float>() {
  return *HWY_DYNAMIC_DISPATCH(f32_passes)();
}
template <>
const Simd<bf16>& simd<bf16>() {
  return *HWY_DYNAMIC_DISPATCH(bf16_passes)();
}
const char* instruction_set() {
  const std::int64_t best = hwy::SupportedAndGeneratedTargets().front();
  return best == HWY_AVX3 ? "AVX-512" : hwy::TargetName(best);
}
const WideSimd& wide_simd() { return *HWY_DYNAMIC_DISPATCH(passes_on_wide)(); }

}  // namespace echelon
#endif
