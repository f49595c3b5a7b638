// Checks and registration of bi_reload::mhc_head. The schema is declared in Python.
#include "mhc_arguments.h"

namespace {

using bi::Tensor;

void mhc_head(const Tensor& residual, const Tensor& fn, const Tensor& scale, const Tensor& base, double rms_eps,
              double hc_eps, const Tensor& out) {
    const int32_t device = residual.get_device_index();
    STD_TORCH_CHECK(residual.dim() == 3, "residual: expected 3 dimensions, got ", residual.dim());
    const int64_t rows = residual.size(0), hidden = residual.size(2), k = 4 * hidden;
    bi::check_hidden(hidden, 64, rows);
    bi::check_bf16(residual, "residual", {rows, 4, hidden}, device);
    bi::check_float(fn, "fn", {4, k}, device, 16);
    bi::check_float(scale, "scale", {1}, device);
    bi::check_float(base, "base", {4}, device);
    bi::check_bf16(out, "out", {rows, hidden}, device);
    bi::check_apart({{"out", &out}}, {{"residual", &residual}, {"fn", &fn}, {"scale", &scale}, {"base", &base}});
    if (rows == 0) return;

    bi::MhcGatesArgs gates{};
    gates.residual = static_cast<const uint16_t*>(residual.const_data_ptr());
    gates.scale = static_cast<const float*>(scale.const_data_ptr());
    gates.base = static_cast<const float*>(base.const_data_ptr());
    gates.layer_input = static_cast<uint16_t*>(out.mutable_data_ptr());
    gates.rows = rows;
    gates.hidden = static_cast<int>(hidden);
    gates.rms_eps = static_cast<float>(rms_eps);
    gates.hc_eps = static_cast<float>(hc_eps);
    bi::run_mhc<4, bi::MhcForm::kHead>(residual, fn, k, gates, device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_reload, CUDA, m) { m.impl("mhc_head", TORCH_BOX(&mhc_head)); }
