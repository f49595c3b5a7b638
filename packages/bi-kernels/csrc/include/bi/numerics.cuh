// Arithmetic shared by every kernel: each function repeats, operation by operation, what the Python references do.
//
// Only correctly rounded operations appear here, each spelled as an intrinsic, so the bits depend neither on the
// compiler's flags nor on what surrounds the call. The same text compiles for the host (the tests evaluate it there
// over whole input domains, without a GPU); that needs -ffp-contract=off, which the device intrinsics make moot.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#define BI_FN __device__ __forceinline__
#define BI_SLOW __device__ __noinline__
#else
#include <algorithm>
#include <cmath>
#define BI_FN inline
#define BI_SLOW inline
#endif

namespace bi {

#ifdef __CUDACC__
BI_FN float add_rn(float a, float b) { return __fadd_rn(a, b); }
BI_FN float mul_rn(float a, float b) { return __fmul_rn(a, b); }
BI_FN float div_rn(float a, float b) { return __fdiv_rn(a, b); }
BI_FN float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
BI_FN uint32_t float_bits(float x) { return __float_as_uint(x); }
BI_FN float bits_float(uint32_t b) { return __uint_as_float(b); }
BI_FN float min_f(float a, float b) { return fminf(a, b); }
BI_FN float max_f(float a, float b) { return fmaxf(a, b); }
BI_FN uint32_t min_u(uint32_t a, uint32_t b) { return ::min(a, b); }
BI_FN int32_t max_i(int32_t a, int32_t b) { return ::max(a, b); }
// torch.clamp keeps NaN; fminf and fmaxf would replace it by the limit.
BI_FN float min_nan(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
BI_FN float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
BI_FN uint32_t min_nan_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// The smaller or larger magnitude, with the product of the signs; NaN where either is.
BI_FN uint32_t min_abs_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
BI_FN uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// -0 becomes +0; nothing else changes.
BI_FN uint32_t unsigned_zero_bf16x2(uint32_t a) {
    uint32_t r;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(0u));
    return r;
}
// Both products rounded once to bfloat16.
BI_FN uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// acc + 0 * pair in both halves: a zero stays a zero until an infinity or a NaN comes, and is NaN from then on.
BI_FN uint32_t poison_bf16x2(uint32_t pair, uint32_t acc) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0u), "r"(acc));
    return r;
}
// 1 / x within one unit in the last place; subnormal results are flushed.
BI_FN float rcp_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Per half word, as unsigned integers.
BI_FN uint32_t max_u16x2(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
// Two floats rounded to bfloat16, nearest even, `lo` in the low half.
BI_FN uint32_t pack_bf16(float lo, float hi) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    uint32_t b;
    memcpy(&b, &v, sizeof(b));
    return b;
}
#else
BI_FN float add_rn(float a, float b) { return a + b; }
BI_FN float mul_rn(float a, float b) { return a * b; }
BI_FN float div_rn(float a, float b) { return a / b; }
BI_FN float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
BI_FN uint32_t float_bits(float x) {
    uint32_t b;
    std::memcpy(&b, &x, sizeof(b));
    return b;
}
BI_FN float bits_float(uint32_t b) {
    float x;
    std::memcpy(&x, &b, sizeof(x));
    return x;
}
BI_FN float min_f(float a, float b) { return std::fmin(a, b); }
BI_FN float max_f(float a, float b) { return std::fmax(a, b); }
BI_FN uint32_t min_u(uint32_t a, uint32_t b) { return std::min(a, b); }
BI_FN int32_t max_i(int32_t a, int32_t b) { return std::max(a, b); }
BI_FN float min_nan(float a, float b) { return std::isnan(a) ? a : std::fmin(a, b); }
BI_FN float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? a + b : std::fmax(a, b); }
#ifndef BI_HOST_RCP
#define BI_HOST_RCP(x) (1.0f / (x))
#endif
BI_FN float rcp_approx(float x) { return BI_HOST_RCP(x); }
BI_FN uint32_t max_u16x2(uint32_t a, uint32_t b) {
    return std::max(a & 0xffffu, b & 0xffffu) | std::max(a & 0xffff0000u, b & 0xffff0000u);
}
BI_FN uint32_t bf16_bits(float x) {
    const uint32_t b = float_bits(x);
    return std::isnan(x) ? 0x7fffu : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
BI_FN uint32_t pack_bf16(float lo, float hi) { return bf16_bits(lo) | bf16_bits(hi) << 16; }
#endif

// The two halves of a word of bfloat16, widened exactly.
BI_FN float bf16_lo(uint32_t pair) { return bits_float(pair << 16); }
BI_FN float bf16_hi(uint32_t pair) { return bits_float(pair & 0xffff0000u); }

constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2**23: adding it rounds to the nearest integer, ties to even
constexpr uint32_t kInfBits = 0x7f800000u;
constexpr uint32_t kNaNBits = 0x7fc00000u;  // the NaN that torch writes; the GPU's own is 0x7fffffff

#ifndef __CUDACC__
BI_FN uint32_t min_nan_bf16x2(uint32_t a, uint32_t b) {
    return pack_bf16(min_nan(bf16_lo(a), bf16_lo(b)), min_nan(bf16_hi(a), bf16_hi(b)));
}
BI_FN uint32_t signs(uint32_t a, uint32_t b) { return (a ^ b) & 0x80008000u; }
BI_FN uint32_t magnitudes(uint32_t a) { return a & 0x7fff7fffu; }
BI_FN uint32_t min_abs_bf16x2(uint32_t a, uint32_t b) {
    return min_nan_bf16x2(magnitudes(a), magnitudes(b)) | signs(a, b);
}
BI_FN uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
    a = magnitudes(a) ^ 0x80008000u, b = magnitudes(b) ^ 0x80008000u;
    return (min_nan_bf16x2(a, b) & 0x7fff7fffu) | signs(a, b);
}
BI_FN uint32_t unsigned_zero_bf16x2(uint32_t a) {
    if ((a & 0xffffu) == 0x8000u) a &= 0xffff0000u;
    if ((a & 0xffff0000u) == 0x80000000u) a &= 0xffffu;
    return a;
}
BI_FN uint32_t mul_bf16(float a, float b) {
    // A double holds the product of two bfloat16 numbers, and rounds nothing off that bfloat16 would keep.
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const float once = static_cast<float>(product);
    if (std::isnan(once) || std::fabs(once) >= 1.17549435e-38f) return bf16_bits(once);
    return bf16_bits(static_cast<float>(std::nearbyint(product * 0x1p133) * 0x1p-133)) |
           (std::signbit(product) ? 0x8000u : 0u);
}
BI_FN uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    return mul_bf16(bf16_lo(a), bf16_lo(b)) | mul_bf16(bf16_hi(a), bf16_hi(b)) << 16;
}
#endif

// exp(c) / 2**n for |c| <= 105, with n = c / ln 2 rounded to an integer; `shifted` is kRoundToInteger + n. The chain is
// that of bi_kernels.reference.numerics.exp.
BI_FN float exp_mantissa(float c, float& shifted) {
    constexpr float kLog2e = 1.44269502162933349609375f;  // float32(1 / ln 2)
    constexpr float kLn2Hi = 0.693359375f;
    constexpr float kLn2Lo = -2.12194440e-4f;
    shifted = add_rn(mul_rn(c, kLog2e), kRoundToInteger);
    const float n = add_rn(shifted, -kRoundToInteger);
    float r = fma_rn(n, -kLn2Hi, c);
    r = fma_rn(n, -kLn2Lo, r);
    float p = static_cast<float>(1.0 / 5040.0);
    p = fma_rn(p, r, static_cast<float>(1.0 / 720.0));
    p = fma_rn(p, r, static_cast<float>(1.0 / 120.0));
    p = fma_rn(p, r, static_cast<float>(1.0 / 24.0));
    p = fma_rn(p, r, static_cast<float>(1.0 / 6.0));
    p = fma_rn(p, r, 0.5f);
    p = fma_rn(p, r, 1.0f);
    return fma_rn(p, r, 1.0f);
}

// exp(v) for v <= 0, with the reference's bits: 2**n in two steps, so that a subnormal result is rounded once.
BI_FN float exp_negative(float v) {
    float shifted;
    const float p = exp_mantissa(max_f(v, -105.0f), shifted);
    const int32_t whole = static_cast<int32_t>(float_bits(shifted) - float_bits(kRoundToInteger));  // n
    const int32_t half = whole >> 1;
    const float a = bits_float(static_cast<uint32_t>(half + 127) << 23);
    const float b = bits_float(static_cast<uint32_t>(whole - half + 127) << 23);
    return mul_rn(mul_rn(p, a), b);
}

// log(x) for finite x >= 1. The chain is that of bi_kernels.reference.numerics.log.
BI_FN float log_from_one(float x) {
    constexpr float kLn2Hi = 0.693359375f;
    constexpr float kLn2Lo = -2.12194440e-4f;
    // x = 2**e m with m in [sqrt(1/2), sqrt(2)).
    const int32_t e = static_cast<int32_t>(float_bits(x) - 0x3f3504f3u) >> 23;
    const float m = bits_float(float_bits(x) - (static_cast<uint32_t>(e) << 23));
    const float s = div_rn(add_rn(m, -1.0f), add_rn(m, 1.0f));
    const float q = mul_rn(s, s);
    float p = static_cast<float>(1.0 / 11.0);
    p = fma_rn(p, q, static_cast<float>(1.0 / 9.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 7.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 5.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 3.0));
    const float ln_m = mul_rn(2.0f, fma_rn(mul_rn(p, q), s, s));
    const float n = static_cast<float>(e);
    return fma_rn(n, kLn2Hi, fma_rn(n, kLn2Lo, ln_m));
}

// 1 + exp(v), with the bits of the reference's 1.0 + exp(v) for every v that is not NaN (NaN gives 1).
//
// The reference scales by 2**n in two multiplications. Adding n to the exponent field is the same wherever the result
// is normal; below 2**-25 the sum is 1 whatever exp gave, so the lower clamp may be tighter than the reference's; and
// above, n = 128 carries a mantissa >= 1 to or past the pattern of infinity, where the min stops it.
BI_FN float one_plus_exp(float v) {
    float shifted;
    const float p = exp_mantissa(min_f(max_f(v, -80.0f), 89.0f), shifted);
    // The low bits of `shifted` are n in two's complement; the shift drops everything above them.
    return add_rn(1.0f, bits_float(min_u(float_bits(p) + (float_bits(shifted) << 23), kInfBits)));
}

// x / (1 + exp(-x)); NaN for NaN and for -inf.
BI_FN float silu(float x) { return div_rn(x, one_plus_exp(-x)); }

}  // namespace bi
