// Checks and registration of ds4_bi::top_k_per_row_prefill. The schema is declared in Python.
#include "top_k_per_row.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

void top_k_per_row_prefill(const Tensor& logits, const Tensor& row_starts, const Tensor& row_ends,
                           const Tensor& indices, int64_t top_k) {
    using Type = torch::headeronly::ScalarType;
    const int32_t device = logits.get_device_index();
    bi::check_tensor(logits, "logits", Type::Float, "float32", 2, device);
    bi::check_tensor(row_starts, "row_starts", Type::Int, "int32", 1, device);
    bi::check_tensor(row_ends, "row_ends", Type::Int, "int32", 1, device);
    bi::check_tensor(indices, "indices", Type::Int, "int32", 2, device);
    const int64_t rows = logits.size(0), columns = logits.size(1);
    bi::check_size(row_starts, "row_starts", 0, rows);
    bi::check_size(row_ends, "row_ends", 0, rows);
    bi::check_size(indices, "indices", 0, rows);
    STD_TORCH_CHECK(top_k >= 0 && top_k <= indices.size(1), "indices: expected ", top_k, " columns or more, got ",
                    indices.size(1));
    constexpr int64_t kLimit = int64_t{1} << 31;
    STD_TORCH_CHECK(columns < kLimit && top_k < kLimit, "expected fewer than 2**31 columns, got ", columns);
    STD_TORCH_CHECK(rows < kLimit / bi::kTopKMaxSplit, "logits: expected fewer than 2**28 rows, got ", rows);

    int processors = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    const bi::TopKArgs args{
        .logits = static_cast<const float*>(logits.const_data_ptr()),
        .starts = static_cast<const int32_t*>(row_starts.const_data_ptr()),
        .ends = static_cast<const int32_t*>(row_ends.const_data_ptr()),
        .out = static_cast<int32_t*>(indices.mutable_data_ptr()),
        .logits_row = logits.stride(0),
        .logits_column = columns > 1 ? logits.stride(1) : 1,
        .starts_stride = row_starts.stride(0),
        .ends_stride = row_ends.stride(0),
        .out_row = indices.stride(0),
        .out_column = indices.stride(1),
        .width = indices.size(1),
        .top_k = static_cast<uint32_t>(top_k),
        .held = 0,
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    STD_CUDA_CHECK(bi::top_k_per_row(args, rows, columns, processors, bi::current_stream(device)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds4_bi, CUDA, m) { m.impl("top_k_per_row_prefill", TORCH_BOX(&top_k_per_row_prefill)); }
