// Checks that the mHC ops share, and the room for the pieces of their projection.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <utility>

#include "bi/torch_stable.h"
#include "mhc_gates.cuh"

namespace bi {

using NamedTensor = std::pair<const char*, const Tensor*>;

// Contiguous, of the given shape, starting at a multiple of `alignment` bytes.
inline void check_dense(const Tensor& t, const char* name, ScalarType dtype, const char* dtype_name,
                        std::initializer_list<int64_t> shape, int32_t device, int64_t alignment) {
    check_tensor(t, name, dtype, dtype_name, static_cast<int64_t>(shape.size()), device);
    int64_t dim = 0;
    for (const int64_t size : shape) check_size(t, name, dim++, size);
    STD_TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous memory");
    STD_TORCH_CHECK(t.numel() == 0 || reinterpret_cast<uintptr_t>(t.data_ptr()) % alignment == 0, name,
                    ": expected memory that starts at a multiple of ", alignment, " bytes. Clone it.");
}
inline void check_bf16(const Tensor& t, const char* name, std::initializer_list<int64_t> shape, int32_t device) {
    check_dense(t, name, ScalarType::BFloat16, "bfloat16", shape, device, 16);
}
inline void check_float(const Tensor& t, const char* name, std::initializer_list<int64_t> shape, int32_t device,
                        int64_t alignment = 4) {
    check_dense(t, name, ScalarType::Float, "float32", shape, device, alignment);
}

// Every output has memory of its own. All are contiguous.
inline void check_apart(std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> inputs) {
    const auto overlap = [](const Tensor& a, const Tensor& b) {
        const auto begin = [](const Tensor& t) { return static_cast<const char*>(t.data_ptr()); };
        const auto end = [&](const Tensor& t) { return begin(t) + t.numel() * static_cast<int64_t>(t.element_size()); };
        return a.numel() != 0 && b.numel() != 0 && begin(a) < end(b) && begin(b) < end(a);
    };
    for (const NamedTensor* out = outputs.begin(); out != outputs.end(); ++out) {
        for (const NamedTensor& in : inputs) {
            STD_TORCH_CHECK(!overlap(*out->second, *in.second), out->first, ": expected memory apart from ", in.first,
                            ", got overlapping addresses. Pass memory of its own, not a view.");
        }
        for (const NamedTensor* before = outputs.begin(); before != out; ++before) {
            STD_TORCH_CHECK(!overlap(*out->second, *before->second), out->first, ": expected memory apart from ",
                            before->first, ", got overlapping addresses. Pass memory of its own, not a view.");
        }
    }
}

inline void check_hidden(int64_t hidden, int64_t least, int64_t rows) {
    STD_TORCH_CHECK(hidden >= least && hidden % kMhcBlockK == 0 && hidden <= kMhcMaxHidden,
                    "hidden size: expected a multiple of ", kMhcBlockK, " from ", least, " to ", kMhcMaxHidden,
                    ", got ", hidden);
    STD_TORCH_CHECK(rows < int64_t{1} << 30, "tokens: expected fewer than 2**30, got ", rows);
}

// Projects and finishes. `gates` is complete but for the pieces. The room for them comes from torch's allocator, in
// stream order; in a graph it belongs to the graph.
template <int kColumns, MhcForm kForm>
void run_mhc(const Tensor& x, const Tensor& weights, int64_t k, MhcGatesArgs gates, int32_t device) {
    int processors = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    const MhcSplit split = mhc_split(k);
    Tensor partial = torch::stable::new_empty(weights, {gates.rows * split.splits * kMhcPartialStride});
    const MhcProjectionArgs projection{
        .x = static_cast<const uint16_t*>(x.const_data_ptr()),
        .weights = static_cast<const float*>(weights.const_data_ptr()),
        .partial = static_cast<float*>(partial.mutable_data_ptr()),
        .rows = gates.rows,
        .k = k,
        .split = split,
    };
    gates.partial = projection.partial;
    gates.splits = split.splits;
    gates.count = static_cast<float>(k);
    STD_CUDA_CHECK(launch_mhc_projection<kColumns>(projection, processors, stream));
    STD_CUDA_CHECK(launch_mhc_gates<kForm>(gates, stream));
}

}  // namespace bi
