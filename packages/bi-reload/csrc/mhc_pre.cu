// Checks and registration of bi_reload::mhc_pre and bi_reload::mhc_pre_broadcast. The schemas are declared in Python.
#include <optional>

#include "mhc_arguments.h"

namespace {

using bi::Tensor;

struct Settings {
    double rms_eps, hc_eps, norm_eps;
    int64_t sinkhorn_iters;
    double post_mult;
};

template <bi::MhcForm kForm>
void mhc_pre_form(const Tensor& x, const char* x_name, const Tensor& fn, const char* fn_name, const Tensor& scale,
                  const Tensor& base, const std::optional<Tensor>& norm_weight, const Settings& settings,
                  const Tensor& layer_input, const Tensor& post_mix, const Tensor& comb_mix, const Tensor* residual) {
    constexpr bool kBroadcast = kForm == bi::MhcForm::kBroadcast;
    const int32_t device = x.get_device_index();
    STD_TORCH_CHECK(x.dim() == (kBroadcast ? 2 : 3), x_name, ": expected ", kBroadcast ? 2 : 3, " dimensions, got ",
                    x.dim());
    const int64_t rows = x.size(0), hidden = x.size(x.dim() - 1), k = kBroadcast ? hidden : 4 * hidden;
    bi::check_hidden(hidden, kBroadcast ? 128 : 64, rows);
    if constexpr (kBroadcast) {
        bi::check_bf16(x, x_name, {rows, hidden}, device);
    } else {
        bi::check_bf16(x, x_name, {rows, 4, hidden}, device);
    }
    bi::check_float(fn, fn_name, {24, k}, device, 16);
    bi::check_float(scale, "scale", {3}, device);
    bi::check_float(base, "base", {24}, device);
    const Tensor& norm = norm_weight.has_value() ? *norm_weight : base;
    if (norm_weight.has_value()) bi::check_bf16(norm, "norm_weight", {hidden}, device);
    STD_TORCH_CHECK(settings.sinkhorn_iters >= 1 && settings.sinkhorn_iters < int64_t{1} << 31,
                    "sinkhorn_iters: expected at least 1, got ", settings.sinkhorn_iters);
    bi::check_bf16(layer_input, "layer_input", {rows, hidden}, device);
    bi::check_float(post_mix, "post_mix", {rows, 4}, device);
    bi::check_float(comb_mix, "comb_mix", {rows, 4, 4}, device);
    if constexpr (kBroadcast) bi::check_bf16(*residual, "residual", {rows, 4, hidden}, device);
    const Tensor& last = kBroadcast ? *residual : comb_mix;
    const auto check_apart = [&](std::initializer_list<bi::NamedTensor> outputs) {
        bi::check_apart(outputs,
                        {{x_name, &x}, {fn_name, &fn}, {"scale", &scale}, {"base", &base}, {"norm_weight", &norm}});
    };
    if constexpr (kBroadcast) {
        check_apart(
            {{"layer_input", &layer_input}, {"post_mix", &post_mix}, {"comb_mix", &comb_mix}, {"residual", &last}});
    } else {
        check_apart({{"layer_input", &layer_input}, {"post_mix", &post_mix}, {"comb_mix", &comb_mix}});
    }
    if (rows == 0) return;

    const bi::MhcGatesArgs gates{
        .partial = nullptr,
        .residual = static_cast<const uint16_t*>(x.const_data_ptr()),
        .scale = static_cast<const float*>(scale.const_data_ptr()),
        .base = static_cast<const float*>(base.const_data_ptr()),
        .norm_weight = norm_weight.has_value() ? static_cast<const uint16_t*>(norm.const_data_ptr()) : nullptr,
        .layer_input = static_cast<uint16_t*>(layer_input.mutable_data_ptr()),
        .post_mix = static_cast<float*>(post_mix.mutable_data_ptr()),
        .comb_mix = static_cast<float*>(comb_mix.mutable_data_ptr()),
        .residual_out = kBroadcast ? static_cast<uint16_t*>(last.mutable_data_ptr()) : nullptr,
        .rows = rows,
        .hidden = static_cast<int>(hidden),
        .splits = 0,
        .sinkhorn_iters = static_cast<int>(settings.sinkhorn_iters),
        .count = 0.0f,
        .rms_eps = static_cast<float>(settings.rms_eps),
        .hc_eps = static_cast<float>(settings.hc_eps),
        .norm_eps = static_cast<float>(settings.norm_eps),
        .post_mult = static_cast<float>(settings.post_mult),
    };
    bi::run_mhc<24, kForm>(x, fn, k, gates, device);
}

void mhc_pre(const Tensor& residual, const Tensor& fn, const Tensor& scale, const Tensor& base,
             const std::optional<Tensor>& norm_weight, double rms_eps, double hc_eps, double norm_eps,
             int64_t sinkhorn_iters, double post_mult, const Tensor& layer_input, const Tensor& post_mix,
             const Tensor& comb_mix) {
    mhc_pre_form<bi::MhcForm::kStreams>(residual, "residual", fn, "fn", scale, base, norm_weight,
                                        {rms_eps, hc_eps, norm_eps, sinkhorn_iters, post_mult}, layer_input, post_mix,
                                        comb_mix, nullptr);
}

void mhc_pre_broadcast(const Tensor& x, const Tensor& fn_broadcast, const Tensor& scale, const Tensor& base,
                       const std::optional<Tensor>& norm_weight, double rms_eps, double hc_eps, double norm_eps,
                       int64_t sinkhorn_iters, double post_mult, const Tensor& layer_input, const Tensor& post_mix,
                       const Tensor& comb_mix, const Tensor& residual) {
    mhc_pre_form<bi::MhcForm::kBroadcast>(x, "x", fn_broadcast, "fn_broadcast", scale, base, norm_weight,
                                          {rms_eps, hc_eps, norm_eps, sinkhorn_iters, post_mult}, layer_input, post_mix,
                                          comb_mix, &residual);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_reload, CUDA, m) {
    m.impl("mhc_pre", TORCH_BOX(&mhc_pre));
    m.impl("mhc_pre_broadcast", TORCH_BOX(&mhc_pre_broadcast));
}
