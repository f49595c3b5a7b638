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
#include "log_softmax.cuh"

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

void scaled_pairs(const uint32_t* v, float scale, float* out, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
        bi::scaled<bi::ScaleFormat::kFloat32CeilUe8m0>(v[i], scale, bi::pow2_inverse(scale), out[2 * i], out[2 * i + 1]);
    }
}

void one_plus_exp(const float* v, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = bi::one_plus_exp(v[i]);
}

void exp_negative(const float* v, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = bi::exp_negative(v[i]);
}

void log_from_one(const float* v, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = bi::log_from_one(v[i]);
}

// One row, as the three kernels treat it; `scratch` has a number for each node.
void log_softmax_row(const float* x, float* scratch, float* out, int columns) {
    const bi::HalvingTree tree = bi::halving_tree(columns);
    float largest = x[0];
    for (int i = 1; i < columns; ++i) largest = bi::max_nan(largest, x[i]);
    int size = tree.size[bi::kTreeLevels];
    for (int i = 0; i < size; ++i) scratch[i] = bi::node_sum(x, largest, tree, i);
    while (size > 1) {
        const int half = (size + 1) / 2;
        for (int i = 0; i < size - half; ++i) scratch[i] = bi::add_rn(scratch[i], scratch[i + half]);
        size = half;
    }
    const float log_sum = bi::log_from_one(scratch[0]);
    for (int i = 0; i < columns; ++i) out[i] = bi::log_probability(x[i], largest, log_sum);
}

void silu_mul_quant_plan(int groups, int* plan) {
    const bi::SiluMulQuantPlan p = bi::silu_mul_quant_plan(groups);
    plan[0] = p.groups_per_block, plan[1] = p.blocks_per_row, plan[2] = p.threads, plan[3] = p.expert_row_blocks;
}

}  // extern "C"
