// Hopper's activation: SiLU and the product are each rounded to bfloat16, as vLLM's unfused Hopper chain rounds them.
#pragma once

#include "bi/numerics.cuh"

namespace bi {

struct Sm90 {
    static constexpr int kArch = 90;

    // silu(x) for the bfloat16 values -86.5 < x <= 80: after rounding to bfloat16 it has the bits of the reference, up
    // to the sign of zero. x has 65,536 values, so this is a matter of trying them all, which the tests do: a shorter
    // polynomial than the reference's suffices (2**f for |f| <= 1/2, relative error 2**-23.7), and after one residual
    // step any reciprocal within two units in the last place.
    BI_FN static float silu_quotient(float x, float exponent) {
        constexpr float kLog2e = 1.44269502162933349609375f;
        const float shifted = fma_rn(exponent, -kLog2e, kRoundToInteger);
        const float f = fma_rn(exponent, -kLog2e, -add_rn(shifted, -kRoundToInteger));
        float p = 0.0013276470126584172f;
        p = fma_rn(p, f, 0.009675541892647743f);
        p = fma_rn(p, f, 0.05550713464617729f);
        p = fma_rn(p, f, 0.24022120237350464f);
        p = fma_rn(p, f, 0.6931469440460205f);
        p = fma_rn(p, f, 1.0f);
        const float d = add_rn(1.0f, bits_float(float_bits(p) + (float_bits(shifted) << 23)));
        const float r = rcp_approx(d);
        const float q = mul_rn(x, r);
        return fma_rn(fma_rn(-d, q, x), r, q);
    }

    // Pairs of bfloat16(bfloat16(silu(gate)) * up), for pairs of bfloat16. With kClamp: gate limited from above, up on
    // both sides, to bfloat16(limit); the reference rounds after clamping, but rounding is monotone and leaves bfloat16
    // alone, so rounding the limit is the same.
    //
    // torch rounds the product to float32 first. That is exact, except where it is subnormal: there the second rounding
    // may differ by a unit from the one rounding here. Neither scales (at least 2**-33) nor codes can tell.
    template <bool kClamp, int kPairs>
    BI_FN static void silu_mul(const uint32_t (&gate)[kPairs], const uint32_t (&up)[kPairs], float limit,
                               uint32_t (&y)[kPairs]) {
        constexpr float kFlat = 80.0f;  // from here on silu(x) is x, and exp needs no guard below it
        constexpr uint32_t kFlatPair = 0x42a042a0u;
        uint32_t g[kPairs], u[kPairs];
        uint32_t steepest = 0;
        const uint32_t top = kClamp ? pack_bf16(limit, limit) : 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            g[i] = gate[i], u[i] = up[i];
            if constexpr (kClamp) g[i] = min_nan_bf16x2(g[i], top), u[i] = min_abs_bf16x2(u[i], top);
            u[i] = unsigned_zero_bf16x2(u[i]);  // vLLM adds up's bias, which is 0
            steepest = max_u16x2(steepest, g[i]);
        }
        // As integers, the bfloat16 values <= -86.5 (and NaN with a sign) are those at and above 0xc2ad: there the
        // reciprocal is subnormal. A thread that holds one takes the exact division; the bits are the same.
        constexpr uint32_t kSteep = 0xc2adu;
        const bool plain = (steepest >> 16) < kSteep && (steepest & 0xffffu) < kSteep && (!kClamp || limit <= kFlat);
        if (__builtin_expect(plain, true)) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const uint32_t e = kClamp ? g[i] : min_nan_bf16x2(g[i], kFlatPair);
                const uint32_t s =
                    pack_bf16(silu_quotient(bf16_lo(g[i]), bf16_lo(e)), silu_quotient(bf16_hi(g[i]), bf16_hi(e)));
                // The quotient has the sign of its numerator; the residual step turns -0 into +0.
                y[i] = mul_bf16x2(s | (g[i] & 0x80008000u), u[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) y[i] = mul_bf16x2(silu_pair(g[i]), u[i]);
        }
    }

    // Out of line: sixteen divisions in a row would push the common case out of the instruction cache.
    static BI_SLOW uint32_t silu_pair(uint32_t g) {
        return pack_bf16(silu(bf16_lo(g)), silu(bf16_hi(g))) | (g & 0x80008000u);
    }
};

}  // namespace bi
