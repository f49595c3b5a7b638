// Checks and registration of the index lists' ops. The schemas are declared in Python.
#include "combine_indices.cuh"

#include <optional>

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;
using Type = torch::headeronly::ScalarType;

constexpr int64_t kGridLimit = int64_t{1} << 31;

bi::Integers integers(const Tensor& t, const char* name, int64_t size, int32_t device) {
    const bool wide = t.scalar_type() == Type::Long;
    bi::check_tensor(t, name, wide ? Type::Long : Type::Int, "int32 or int64", 1, device);
    bi::check_size(t, name, 0, size);
    STD_TORCH_CHECK(size < kGridLimit, name, ": expected fewer than 2**31 tokens, got ", size);
    return {t.const_data_ptr(), t.stride(0), wide};
}

void combine_topk_swa(const Tensor& topk_indices, const Tensor& positions, const Tensor& gather_starts,
                      const std::optional<Tensor>& row_offsets, const Tensor& indices, const Tensor& lengths, int64_t,
                      int64_t window_size, int64_t compressed_rows, int64_t row_offset) {
    const int32_t device = topk_indices.get_device_index();
    bi::check_tensor(topk_indices, "topk_indices", Type::Int, "int32", 2, device);
    const int64_t tokens = topk_indices.size(0), top_k = topk_indices.size(1);
    bi::check_tensor(indices, "indices", Type::Int, "int32", 2, device);
    bi::check_size(indices, "indices", 0, tokens);
    STD_TORCH_CHECK(window_size > 0, "window_size: expected a positive int, got ", window_size);
    STD_TORCH_CHECK(indices.size(1) >= top_k + window_size, "indices: expected ", top_k + window_size,
                    " columns or more, got ", indices.size(1));
    bi::check_tensor(lengths, "lengths", Type::Int, "int32", 1, device);
    bi::check_size(lengths, "lengths", 0, tokens);
    const bi::CombineArgs args{
        .topk = static_cast<const int32_t*>(topk_indices.const_data_ptr()),
        .positions = integers(positions, "positions", tokens, device),
        .gather_starts = integers(gather_starts, "gather_starts", tokens, device),
        .row_offsets = row_offsets ? integers(*row_offsets, "row_offset", tokens, device) : bi::Integers{},
        .indices = static_cast<int32_t*>(indices.mutable_data_ptr()),
        .lengths = static_cast<int32_t*>(lengths.mutable_data_ptr()),
        .topk_row = topk_indices.stride(0),
        .topk_column = topk_indices.stride(1),
        .indices_row = indices.stride(0),
        .indices_column = indices.stride(1),
        .lengths_stride = lengths.stride(0),
        .top_k = top_k,
        .width = indices.size(1),
        .window_size = window_size,
        .compressed_rows = compressed_rows,
        .row_offset = row_offset,
    };
    if (tokens == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::combine_topk_swa_kernel<<<static_cast<unsigned>(tokens), bi::kIndexThreads, 0, bi::current_stream(device)>>>(
        args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void c128_indices(const Tensor& positions, const Tensor& indices) {
    const int32_t device = positions.get_device_index();
    bi::check_tensor(indices, "indices", Type::Int, "int32", 2, device);
    const int64_t tokens = indices.size(0);
    const bi::Integers all = integers(positions, "positions", tokens, device);
    if (tokens == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::c128_indices_kernel<<<static_cast<unsigned>(tokens), bi::kIndexThreads, 0, bi::current_stream(device)>>>(
        all, static_cast<int32_t*>(indices.mutable_data_ptr()), indices.stride(0), indices.stride(1), indices.size(1));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds4_bi, CUDA, m) {
    m.impl("combine_topk_swa", TORCH_BOX(&combine_topk_swa));
    m.impl("c128_indices", TORCH_BOX(&c128_indices));
}
