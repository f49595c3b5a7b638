// Checks and registration of bi_reload::fingerprint. The schema is declared in Python.
#include "fingerprint.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

void fingerprint(const Tensor& data, const Tensor& out) {
    using bi::ScalarType;
    const int32_t device = data.get_device_index();
    bi::check_tensor(data, "data", ScalarType::Byte, "uint8", 1, device);
    STD_TORCH_CHECK(data.is_contiguous(), "data: expected contiguous memory");
    bi::check_tensor(out, "out", ScalarType::Long, "int64", 1, device);
    bi::check_size(out, "out", 0, 1);
    const auto* bytes = static_cast<const uint8_t*>(data.const_data_ptr());
    auto* sum = static_cast<unsigned long long*>(out.mutable_data_ptr());
    const auto* at = reinterpret_cast<const uint8_t*>(sum);
    STD_TORCH_CHECK(data.numel() == 0 || at + 8 <= bytes || bytes + data.numel() <= at,
                    "out: expected memory apart from data, got overlapping addresses. Pass memory of its own.");
    int processors = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    const torch::stable::accelerator::DeviceGuard guard(device);
    STD_CUDA_CHECK(bi::launch_fingerprint(bytes, static_cast<uint64_t>(data.numel()), sum, processors,
                                          bi::current_stream(device)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_reload, CUDA, m) { m.impl("fingerprint", TORCH_BOX(&fingerprint)); }
