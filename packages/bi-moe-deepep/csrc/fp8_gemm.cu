// Checks and registration of bi_moe_deepep::m_grouped_fp8_gemm_nt_offsets. The schema is declared in Python.
#include "fp8_gemm.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

void fp8_gemm_offsets(const Tensor& out, const Tensor& q, const Tensor& s, const Tensor& wq, const Tensor& ws,
                      const Tensor& offsets) {
    using Type = torch::headeronly::ScalarType;
    const int32_t device = q.get_device_index();
    bi::check_tensor(q, "q", Type::Float8_e4m3fn, "float8_e4m3fn", 2, device);
    bi::check_tensor(s, "s", Type::Float, "float32", 2, device);
    bi::check_tensor(wq, "wq", Type::Float8_e4m3fn, "float8_e4m3fn", 3, device);
    bi::check_tensor(ws, "ws", Type::Float, "float32", 3, device);
    bi::check_tensor(offsets, "offsets", Type::Int, "int32", 1, device);
    bi::check_tensor(out, "out", Type::BFloat16, "bfloat16", 2, device);
    const int64_t rows = q.size(0), k = q.size(1), experts = wq.size(0), n = wq.size(1), groups = k / 128;
    STD_TORCH_CHECK(k > 0 && k % 128 == 0 && k <= bi::moe::kGemmMaxK, "q: expected K in multiples of 128 from 128 to ",
                    bi::moe::kGemmMaxK, ", got ", k);
    STD_TORCH_CHECK(n > 0 && n % 64 == 0, "wq: expected N a positive multiple of 64, got ", n);
    STD_TORCH_CHECK(experts > 0 && experts <= bi::moe::kGemmMaxExperts, "wq: expected 1 to ", bi::moe::kGemmMaxExperts,
                    " experts, got ", experts);
    constexpr int64_t kMost = (int64_t{1} << 31) - 1024;
    STD_TORCH_CHECK(rows < kMost && experts * n < kMost, "q, wq: expected fewer than 2**31 - 1024 rows");
    bi::check_size(wq, "wq", 2, k);
    bi::check_size(s, "s", 0, rows);
    bi::check_size(s, "s", 1, groups);
    bi::check_size(ws, "ws", 0, experts);
    bi::check_size(ws, "ws", 1, (n + 127) / 128);
    bi::check_size(ws, "ws", 2, groups);
    bi::check_size(offsets, "offsets", 0, experts + 1);
    bi::check_size(out, "out", 0, rows);
    bi::check_size(out, "out", 1, n);
    bi::check_rows_aligned(q, "q", 16);
    bi::check_rows_aligned(wq, "wq", 16);
    bi::check_rows_aligned(out, "out", 4);
    STD_TORCH_CHECK(experts == 1 || wq.stride(0) == n * wq.stride(1), "wq: expected experts without gaps between them");
    STD_TORCH_CHECK(offsets.is_contiguous(), "offsets: expected contiguous memory");

    int major = 0, minor = 0, processors = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    STD_TORCH_CHECK(major == 9 && minor == 0,
                    "m_grouped_fp8_gemm_nt_offsets: expected a GPU of compute capability 9.0, got ", major, ".", minor,
                    ". Its matrix instructions are Hopper's, and no other has been validated.");
    if (rows == 0) return;

    const bi::moe::Fp8GemmProblem problem{
        .q = q.const_data_ptr(),
        .wq = wq.const_data_ptr(),
        .q_row = rows > 1 ? q.stride(0) : k,
        .wq_row = wq.stride(1),
        .args = {.s = static_cast<const float*>(s.const_data_ptr()),
                 .ws = static_cast<const float*>(ws.const_data_ptr()),
                 .offsets = static_cast<const int32_t*>(offsets.const_data_ptr()),
                 .out = static_cast<uint16_t*>(out.mutable_data_ptr()),
                 .s_row = s.stride(0),
                 .s_group = s.stride(1),
                 .ws_expert = ws.stride(0),
                 .ws_row = ws.stride(1),
                 .ws_group = ws.stride(2),
                 .out_row = out.stride(0),
                 .rows = static_cast<int>(rows),
                 .n = static_cast<int>(n),
                 .groups = static_cast<int>(groups),
                 .experts = static_cast<int>(experts),
                 .tiles_n = 0,
                 .stages = 0},
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    STD_CUDA_CHECK(bi::moe::fp8_gemm(problem, processors, bi::current_stream(device)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_moe_deepep, CUDA, m) {
    m.impl("m_grouped_fp8_gemm_nt_offsets", TORCH_BOX(&fp8_gemm_offsets));
}
