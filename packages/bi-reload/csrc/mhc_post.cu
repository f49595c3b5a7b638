// Checks and registration of bi_reload::mhc_post. The schema is declared in Python.
#include "mhc_post.cuh"

#include "mhc_arguments.h"

namespace {

using bi::Tensor;

void mhc_post(const Tensor& x, const Tensor& residual, const Tensor& post_mix, const Tensor& comb_mix,
              const Tensor& out) {
    using bi::ScalarType;
    const int32_t device = x.get_device_index();
    STD_TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
    const int64_t rows = x.size(0), hidden = x.size(1);
    STD_TORCH_CHECK(rows < int64_t{1} << 31, "x: expected fewer than 2**31 tokens, got ", rows);
    STD_TORCH_CHECK(hidden < int64_t{65535} * bi::kMhcPostThreads, "x: expected fewer than ",
                    int64_t{65535} * bi::kMhcPostThreads, " columns, got ", hidden);
    bi::check_dense(x, "x", ScalarType::BFloat16, "bfloat16", {rows, hidden}, device, 2);
    bi::check_dense(residual, "residual", ScalarType::BFloat16, "bfloat16", {rows, 4, hidden}, device, 2);
    bi::check_float(post_mix, "post_mix", {rows, 4}, device);
    bi::check_float(comb_mix, "comb_mix", {rows, 4, 4}, device);
    bi::check_dense(out, "out", ScalarType::BFloat16, "bfloat16", {rows, 4, hidden}, device, 2);
    bi::check_apart({{"out", &out}},
                    {{"x", &x}, {"residual", &residual}, {"post_mix", &post_mix}, {"comb_mix", &comb_mix}});
    if (rows == 0 || hidden == 0) return;

    const bi::MhcPostArgs args{
        .x = static_cast<const uint16_t*>(x.const_data_ptr()),
        .residual = static_cast<const uint16_t*>(residual.const_data_ptr()),
        .post_mix = static_cast<const float*>(post_mix.const_data_ptr()),
        .comb_mix = static_cast<const float*>(comb_mix.const_data_ptr()),
        .out = static_cast<uint16_t*>(out.mutable_data_ptr()),
        .rows = rows,
        .hidden = hidden,
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = bi::current_stream(device);
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.residual) |
                                reinterpret_cast<uintptr_t>(args.out);
    // Each column's arithmetic is the same in both.
    const bool whole_vectors = hidden % 8 == 0 && addresses % 16 == 0;
    STD_CUDA_CHECK(whole_vectors ? bi::launch_mhc_post<4>(args, stream) : bi::launch_mhc_post<0>(args, stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_reload, CUDA, m) { m.impl("mhc_post", TORCH_BOX(&mhc_post)); }
