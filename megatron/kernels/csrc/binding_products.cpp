/* torch.ops.megatron_cc: the products, which CPUs alone have. Only torch's stable ABI. */
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "mcc.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/* Of a matrix whose numbers lie at any distances, from one of its places on. */
const float *matrix(const Tensor &t, int64_t at, const char *what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, what, " must be fp32");
  return static_cast<const float *>(t.data_ptr()) + at;
}

float *rows_of(const Tensor &t, int64_t at) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && (t.stride(-1) == 1 || t.size(-1) <= 1), "out must be fp32, and its rows contiguous");
  return static_cast<float *>(t.data_ptr()) + at;
}

void multiply(const std::vector<mcc_product> &list) {
  const mcc_table *table = mcc_cpu(nullptr);
  STD_TORCH_CHECK(table->products != nullptr, "this processor has no products of this library's");
  table->products(nullptr, list.data(), int64_t(list.size()));
}

void product(const Tensor &a, const Tensor &b, const Tensor &out, bool add) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && out.dim() == 2 && a.size(1) == b.size(0) && out.size(0) == a.size(0) &&
                      out.size(1) == b.size(1),
                  "a must be (m, k), b (k, n) and out (m, n)");
  multiply({{matrix(a, 0, "a"), matrix(b, 0, "b"), rows_of(out, 0), a.size(0), b.size(1), a.size(1), a.stride(0), a.stride(1),
             b.stride(0), b.stride(1), out.stride(0), int(add)}});
}

void grouped_product(const Tensor &a, const Tensor &b, const Tensor &ends, const Tensor &out) {
  const bool rows = b.dim() == 3; /* groups are of the rows of a and out, else of the inner dimension */
  STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Int && ends.dim() == 1 && ends.is_contiguous(), "ends must be int32, flat");
  STD_TORCH_CHECK(a.dim() == 2 && (rows || b.dim() == 2) && out.dim() == (rows ? 2 : 3) && (rows ? b : out).size(0) == ends.size(0) &&
                      a.size(1) == b.size(rows ? 1 : 0) && out.size(-2) == a.size(0) && out.size(-1) == b.size(-1),
                  "a must be (r, k), b (groups, k, n) and out (r, n), or a (m, r), b (r, n) and out (groups, m, n)");
  const int32_t *end = static_cast<const int32_t *>(ends.data_ptr());
  const int64_t total = rows ? a.size(0) : a.size(1);
  std::vector<mcc_product> list;
  for (int64_t g = 0, first = 0; g < ends.size(0); first = end[g++]) {
    const int64_t count = end[g] - first;
    STD_TORCH_CHECK(count >= 0 && end[g] <= total, "ends must ascend to at most ", total);
    if (rows)
      list.push_back({matrix(a, first * a.stride(0), "a"), matrix(b, g * b.stride(0), "b"), rows_of(out, first * out.stride(0)), count,
                      b.size(2), a.size(1), a.stride(0), a.stride(1), b.stride(1), b.stride(2), out.stride(0), 0});
    else
      list.push_back({matrix(a, first * a.stride(1), "a"), matrix(b, first * b.stride(0), "b"), rows_of(out, g * out.stride(0)),
                      a.size(0), b.size(1), count, a.stride(0), a.stride(1), b.stride(0), b.stride(1), out.stride(1), 0});
  }
  STD_TORCH_CHECK(ends.size(0) == 0 || end[ends.size(0) - 1] == total, "ends must ascend to ", total);
  multiply(list);
}

bool multiplies() { return mcc_cpu(nullptr)->products != nullptr; }

bool outdoes_mkl() { return mcc_cpu_outdoes_mkl() != 0; }

int64_t smallest_product() { return mcc_cpu_smallest_product(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_cc, m) {
  m.def("product(Tensor a, Tensor b, Tensor(a!) out, bool add) -> ()");
  m.def("grouped_product(Tensor a, Tensor b, Tensor ends, Tensor(a!) out) -> ()");
  m.def("multiplies() -> bool");
  m.def("outdoes_mkl() -> bool");
  m.def("smallest_product() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_cc, CompositeExplicitAutograd, m) {
  m.impl("multiplies", TORCH_BOX(&multiplies));
  m.impl("outdoes_mkl", TORCH_BOX(&outdoes_mkl));
  m.impl("smallest_product", TORCH_BOX(&smallest_product));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_cc, CPU, m) {
  m.impl("product", TORCH_BOX(&product));
  m.impl("grouped_product", TORCH_BOX(&grouped_product));
}
