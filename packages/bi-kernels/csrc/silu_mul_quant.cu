// Checks and registration of bi_kernels::fused_silu_mul_per_token_group_quant. The schema is declared in Python.
#include <cuda_bf16.h>

#include <optional>

#include "bi/torch_stable.h"
#include "silu_mul_quant.cuh"

namespace {

using bi::ScaleFormat;
using bi::Tensor;

void fused_silu_mul_per_token_group_quant(const Tensor& x, const std::optional<Tensor>& masked_m,
                                          const std::optional<Tensor>& m_indices, std::optional<double> clamp_limit,
                                          int64_t group_size, int64_t scale_format, int64_t arch, const Tensor& out_q,
                                          const Tensor& out_s) {
    using Type = torch::headeronly::ScalarType;
    STD_TORCH_CHECK(group_size == bi::kGroupSize, "group_size: expected ", bi::kGroupSize, ", got ", group_size);
    STD_TORCH_CHECK(scale_format >= 0 && scale_format <= 2,
                    "scale_format: expected 0 (FLOAT32), 1 (FLOAT32_CEIL_UE8M0) or 2 (UE8M0), got ", scale_format);
    STD_TORCH_CHECK(!clamp_limit || *clamp_limit > 0, "clamp_limit: expected a positive number, got ", *clamp_limit);

    const auto format = static_cast<ScaleFormat>(scale_format);
    const int64_t dim = x.dim();
    const bool by_expert = dim == 3;
    const int32_t device = x.get_device_index();
    STD_TORCH_CHECK(dim == 2 || dim == 3, "x: expected 2 or 3 dimensions, got ", dim);
    bi::check_tensor(x, "x", Type::BFloat16, "bfloat16", dim, device);
    bi::check_tensor(out_q, "out_q", Type::Float8_e4m3fn, "float8_e4m3fn", dim, device);
    if (format == ScaleFormat::kUe8m0) {
        bi::check_tensor(out_s, "out_s", Type::Int, "int32", dim, device);
    } else {
        bi::check_tensor(out_s, "out_s", Type::Float, "float32", dim, device);
    }

    const int64_t width = x.size(dim - 1);
    STD_TORCH_CHECK(width % (2 * bi::kGroupSize) == 0 && width < int64_t{1} << 31,
                    "x: expected a last dimension that is a multiple of ", 2 * bi::kGroupSize, ", got ", width);
    const int64_t groups = width / 2 / bi::kGroupSize;
    const int64_t experts = by_expert ? x.size(0) : 1;
    const int64_t rows = x.size(dim - 2);
    for (int64_t d = 0; d < dim - 1; ++d) {
        bi::check_size(out_q, "out_q", d, x.size(d));
        bi::check_size(out_s, "out_s", d, x.size(d));
    }
    bi::check_size(out_q, "out_q", dim - 1, width / 2);
    bi::check_size(out_s, "out_s", dim - 1, format == ScaleFormat::kUe8m0 ? (groups + 3) / 4 : groups);
    bi::check_rows_aligned(x, "x", 16);
    bi::check_rows_aligned(out_q, "out_q", 8);
    if (masked_m.has_value()) {
        STD_TORCH_CHECK(by_expert, "masked_m: expected none, as x has 2 dimensions. Pass x as [E, T, 2 I].");
        bi::check_tensor(*masked_m, "masked_m", Type::Int, "int32", 1, device);
        bi::check_size(*masked_m, "masked_m", 0, experts);
        STD_TORCH_CHECK(experts <= 1 || masked_m->stride(0) == 1, "masked_m: expected contiguous memory");
    }
    if (m_indices.has_value()) {
        STD_TORCH_CHECK(!by_expert, "m_indices: expected none, as x has 3 dimensions. Pass x as [M, 2 I].");
        bi::check_tensor(*m_indices, "m_indices", Type::Int, "int32", 1, device);
        bi::check_size(*m_indices, "m_indices", 0, rows);
        STD_TORCH_CHECK(rows <= 1 || m_indices->stride(0) == 1, "m_indices: expected contiguous memory");
    }
    bi::check_arch(arch, device);

    const bi::SiluMulQuantArgs args{
        .x = static_cast<const uint16_t*>(x.const_data_ptr()),
        .masked_m = masked_m.has_value() ? static_cast<const int32_t*>(masked_m->const_data_ptr()) : nullptr,
        .q = static_cast<uint8_t*>(out_q.mutable_data_ptr()),
        .s = out_s.mutable_data_ptr(),
        .x_expert = by_expert ? x.stride(0) : 0,
        .x_row = x.stride(dim - 2),
        .q_expert = by_expert ? out_q.stride(0) : 0,
        .q_row = out_q.stride(dim - 2),
        .s_expert = by_expert ? out_s.stride(0) : 0,
        .s_row = out_s.stride(dim - 2),
        .s_group = out_s.stride(dim - 1),
        .experts = experts,
        .rows = rows,
        .groups = static_cast<int>(groups),
        .clamp_limit = static_cast<float>(clamp_limit.value_or(0.0)),
        .m_indices = m_indices.has_value() ? static_cast<const int32_t*>(m_indices->const_data_ptr()) : nullptr,
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = bi::current_stream(device);
    const bool clamp = clamp_limit.has_value();
    switch (format) {
        case ScaleFormat::kFloat32:
            bi::silu_mul_quant<ScaleFormat::kFloat32>(args, clamp, by_expert, stream);
            break;
        case ScaleFormat::kFloat32CeilUe8m0:
            bi::silu_mul_quant<ScaleFormat::kFloat32CeilUe8m0>(args, clamp, by_expert, stream);
            break;
        case ScaleFormat::kUe8m0:
            bi::silu_mul_quant<ScaleFormat::kUe8m0>(args, clamp, by_expert, stream);
            break;
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_kernels, CUDA, m) {
    m.impl("fused_silu_mul_per_token_group_quant", TORCH_BOX(&fused_silu_mul_per_token_group_quant));
}
