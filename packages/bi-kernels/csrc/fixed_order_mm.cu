// Checks and registration of bi_kernels::fixed_order_mm. The schema is declared in Python.
#include "fixed_order_mm.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

void fixed_order_mm(const Tensor& x, const Tensor& weight, const Tensor& out) {
    using Type = torch::headeronly::ScalarType;
    const int32_t device = x.get_device_index();
    const bool bf16 = out.scalar_type() == Type::BFloat16;
    bi::check_tensor(x, "x", Type::BFloat16, "bfloat16", 2, device);
    bi::check_tensor(weight, "weight", Type::BFloat16, "bfloat16", 2, device);
    bi::check_tensor(out, "out", bf16 ? Type::BFloat16 : Type::Float, "float32 or bfloat16", 2, device);
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    bi::check_size(weight, "weight", 1, k);
    bi::check_size(out, "out", 0, m);
    bi::check_size(out, "out", 1, n);
    STD_TORCH_CHECK(m < int64_t{1} << 31, "x: expected fewer than 2**31 rows, got ", m);
    STD_TORCH_CHECK(n > 0 && n % 64 == 0 && n < int64_t{1} << 31,
                    "weight: expected N a positive multiple of 64 below 2**31, got ", n);
    // Tiles are counted in 32 bits. No memory holds as many.
    STD_TORCH_CHECK(m * n < int64_t{1} << 42, "out: expected fewer than 2**42 elements, got ", m, " x ", n);
    STD_TORCH_CHECK(k == 2048 || k == 4096 || k == 7168, "x: expected K in {2048, 4096, 7168}, got ", k);
    bi::check_rows_aligned(x, "x", 16);
    bi::check_rows_aligned(weight, "weight", 16);
    bi::check_rows_aligned(out, "out", bf16 ? 4 : 8);

    int major = 0, minor = 0, processors = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    STD_TORCH_CHECK(major == 9 && minor == 0, "fixed_order_mm: expected a GPU of compute capability 9.0, got ", major,
                    ".", minor, ". Its matrix instructions are Hopper's, and no other has been validated.");
    if (m == 0) return;

    const bi::FixedOrderMmProblem problem{
        .x = x.const_data_ptr(),
        .w = weight.const_data_ptr(),
        .x_stride = m > 1 ? x.stride(0) : k,
        .w_stride = weight.stride(0),
        .args = {.out = out.mutable_data_ptr(),
                 .out_stride = out.stride(0),
                 .m = m,
                 .n = static_cast<int>(n),
                 .k = static_cast<int>(k),
                 .x_rows = 0,
                 .tiles_m = 0,
                 .tiles_n = 0,
                 .tiles = 0,
                 .band = 0},
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = bi::current_stream(device);
    STD_CUDA_CHECK(bf16 ? bi::fixed_order_mm<true>(problem, processors, stream)
                        : bi::fixed_order_mm<false>(problem, processors, stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_kernels, CUDA, m) { m.impl("fixed_order_mm", TORCH_BOX(&fixed_order_mm)); }
