// Hopper's activation: SiLU and the product are each rounded to bfloat16, as vLLM's unfused Hopper chain rounds them.
#pragma once

#include "bi/numerics.cuh"

namespace bi {

struct Sm90 {
    static constexpr int kArch = 90;

    // silu(x) for the bfloat16 values x > -86.5: after rounding to bfloat16 it has the bits of the exact quotient, up
    // to the sign of zero. x has 65,536 values; one residual step on an approximate reciprocal suffices for every one
    // of them, with any reciprocal within two units in the last place (the tests try them all).
    BI_FN static float silu_quotient(float x) {
        const float d = one_plus_exp<true>(-x);
        const float r = rcp_approx(d);
        const float q = mul_rn(x, r);
        return fma_rn(fma_rn(-d, q, x), r, q);
    }

    // Pairs of bfloat16(bfloat16(silu(gate)) * up), for pairs of bfloat16. With kClamp: gate limited from above, up on
    // both sides, to bfloat16(limit); the reference rounds after clamping, but rounding is monotone and leaves bfloat16
    // alone, so rounding the limit is the same.
    template <bool kClamp, int kPairs>
    BI_FN static void silu_mul(const uint32_t (&gate)[kPairs], const uint32_t (&up)[kPairs], float limit,
                               uint32_t (&y)[kPairs]) {
        uint32_t g[kPairs], u[kPairs];
        uint32_t steepest = 0;
        const uint32_t top = kClamp ? pack_bf16(limit, limit) : 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            g[i] = gate[i], u[i] = up[i];
            if constexpr (kClamp) {
                g[i] = min_nan_bf16x2(g[i], top);
                u[i] = max_nan_bf16x2(min_nan_bf16x2(u[i], top), top ^ 0x80008000u);
            }
            steepest = max_u16x2(steepest, g[i]);
        }
        // As integers, the bfloat16 values <= -86.5 (and NaN with a sign) are those at and above 0xc2ad: there the
        // reciprocal is subnormal. A thread that holds one takes the exact division; the bits are the same.
        constexpr uint32_t kSteep = 0xc2adu;
        const bool plain = (steepest >> 16) < kSteep && (steepest & 0xffffu) < kSteep;
        float s_lo[kPairs], s_hi[kPairs];
        if (__builtin_expect(plain, true)) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                s_lo[i] = silu_quotient(bf16_lo(g[i])), s_hi[i] = silu_quotient(bf16_hi(g[i]));
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) s_lo[i] = silu(bf16_lo(g[i])), s_hi[i] = silu(bf16_hi(g[i]));
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            // The quotient has the sign of its numerator; the residual step turns -0 into +0.
            const uint32_t s = pack_bf16(s_lo[i], s_hi[i]) | (g[i] & 0x80008000u);
            // Through float32, as in torch: HMUL2.BF16 would round subnormal products once, not twice.
            y[i] = pack_bf16(mul_rn(bf16_lo(s), bf16_lo(u[i])), mul_rn(bf16_hi(s), bf16_hi(u[i])));
        }
    }
};

}  // namespace bi
