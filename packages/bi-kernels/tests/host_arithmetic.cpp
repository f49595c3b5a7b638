// The kernels' arithmetic, compiled for the host: see test_kernel_arithmetic.py.
#include <cstdint>
#include <cstring>

// What a GPU's approximate reciprocal may return: the correctly rounded one, off by so many units in the last place.
static int reciprocal_error = 0;
static float approximate_reciprocal(float x) {
    float r = static_cast<float>(1.0 / static_cast<double>(x));
    uint32_t bits;
    std::memcpy(&bits, &r, sizeof(bits));
    bits += static_cast<uint32_t>(reciprocal_error);
    std::memcpy(&r, &bits, sizeof(r));
    return r < 1.17549435e-38f ? 0.0f : r;
}
#define BI_HOST_RCP(x) approximate_reciprocal(x)

#include "bi/fp8.cuh"
#include "bi/launch.cuh"
#include "bi/numerics_sm100.cuh"
#include "bi/numerics_sm90.cuh"

template <typename Arch, bool kClamp>
static void silu_mul(const uint32_t* gate, const uint32_t* up, float limit, uint32_t* y, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
        const uint32_t g[1] = {gate[i]}, u[1] = {up[i]};
        uint32_t out[1];
        Arch::template silu_mul<kClamp>(g, u, limit, out);
        y[i] = out[0];
    }
}

extern "C" {

void set_reciprocal_error(int ulps) { reciprocal_error = ulps; }

// Words of two bfloat16; no clamp where `limit` is 0.
void silu_mul_pairs(int arch, const uint32_t* gate, const uint32_t* up, float limit, uint32_t* y, int64_t pairs) {
    if (arch == 90) {
        limit > 0 ? silu_mul<bi::Sm90, true>(gate, up, limit, y, pairs)
                  : silu_mul<bi::Sm90, false>(gate, up, limit, y, pairs);
    } else {
        limit > 0 ? silu_mul<bi::Sm100, true>(gate, up, limit, y, pairs)
                  : silu_mul<bi::Sm100, false>(gate, up, limit, y, pairs);
    }
}

void group_scales(int ceil, const float* amax, float* scale, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        scale[i] = ceil ? bi::group_scale<bi::ScaleFormat::kFloat32CeilUe8m0>(amax[i])
                        : bi::group_scale<bi::ScaleFormat::kFloat32>(amax[i]);
    }
}

void scaled_by_inverse(const float* v, float scale, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        out[i] = bi::scaled<bi::ScaleFormat::kFloat32CeilUe8m0>(v[i], scale, bi::pow2_inverse(scale));
    }
}

void one_plus_exp(const float* v, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = bi::one_plus_exp(v[i]);
}

void silu_mul_quant_plan(int groups, int* plan) {
    const bi::SiluMulQuantPlan p = bi::silu_mul_quant_plan(groups);
    plan[0] = p.groups_per_block, plan[1] = p.blocks_per_row, plan[2] = p.threads;
}

}  // extern "C"
