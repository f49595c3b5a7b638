// Blackwell's activation: float32 throughout, one rounding of the product to bfloat16.
#pragma once

#include "bi/numerics.cuh"

namespace bi {

struct Sm100 {
    static constexpr int kArch = 100;

    // Pairs of bfloat16(silu(gate) * up), for pairs of bfloat16. With kClamp: gate limited from above, up on both
    // sides, in float32.
    template <bool kClamp, int kPairs>
    BI_FN static void silu_mul(const uint32_t (&gate)[kPairs], const uint32_t (&up)[kPairs], float limit,
                               uint32_t (&y)[kPairs]) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            y[i] = pack_bf16(product<kClamp>(bf16_lo(gate[i]), bf16_lo(up[i]), limit),
                             product<kClamp>(bf16_hi(gate[i]), bf16_hi(up[i]), limit));
        }
    }

    template <bool kClamp>
    BI_FN static float product(float gate, float up, float limit) {
        if constexpr (kClamp) {
            gate = min_nan(gate, limit);
            up = max_nan(min_nan(up, limit), -limit);
        }
        return mul_rn(silu(gate), add_rn(up, 0.0f));  // vLLM adds up's bias, which is 0: -0 becomes +0
    }
};

}  // namespace bi
