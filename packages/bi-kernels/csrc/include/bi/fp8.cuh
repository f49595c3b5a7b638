// float32 -> e4m3 and the 128-element group scale of design.md's quantiser.
#pragma once

#include "bi/numerics.cuh"

#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

namespace bi {

// Values are those of bi_kernels.ScaleFormat, in order of definition.
enum class ScaleFormat : int { kFloat32 = 0, kFloat32CeilUe8m0 = 1, kUe8m0 = 2 };

constexpr float kE4m3Max = 448.0f;
constexpr float kScaleFloor = 1e-10f;
constexpr uint32_t kNaNCode = 0x7fu;      // e4m3's NaN
constexpr uint32_t kNaNExponent = 0xffu;  // e8m0's NaN

// Scale of a group whose largest magnitude is `amax`, a finite bfloat16 value.
//
// The ceil formats need no division. 448 is 1.75 * 2**8, so the smallest power of two that is not below amax / 448 has
// amax's exponent less 8, plus one where amax's mantissa is above 1.75. Rounding amax / 448 to float32 first, as the
// reference does, changes nothing: a bfloat16 quotient is a power of two or at least 2**-8 away from one. The floor
// of 1e-10 becomes 2**-33.
template <ScaleFormat kFormat>
BI_FN float group_scale(float amax) {
    if constexpr (kFormat == ScaleFormat::kFloat32) {
        return div_rn(max_f(amax, kScaleFloor), kE4m3Max);
    } else {
        constexpr int32_t kBelow175 = 0x1fffff;  // carries into the exponent from a mantissa above 0.75
        constexpr int32_t kFloorBits = (127 - 33) << 23;
        const int32_t up = (static_cast<int32_t>(float_bits(amax)) + kBelow175) & 0x7f800000;
        return bits_float(static_cast<uint32_t>(max_i(up - (8 << 23), kFloorBits)));
    }
}

// v / scale, correctly rounded. A power of two has an exact reciprocal (2**-33 <= scale <= 2**120 here), so one
// multiplication gives the bits of the division; `inverse` is that reciprocal.
BI_FN float pow2_inverse(float scale) { return bits_float(0x7f000000u - float_bits(scale)); }

template <ScaleFormat kFormat>
BI_FN float scaled(float v, float scale, float inverse) {
    if constexpr (kFormat == ScaleFormat::kFloat32) {
        return div_rn(v, scale);
    } else {
        return mul_rn(v, inverse);
    }
}

#ifdef __CUDACC__
// Two e4m3 codes, `lo` in the low byte: nearest even, saturating at +-448, which equals clamping first because 448 is
// a code; the sign of zero is kept. Neither value is NaN.
BI_FN uint32_t pack_e4m3(float lo, float hi) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
}
#endif

}  // namespace bi
