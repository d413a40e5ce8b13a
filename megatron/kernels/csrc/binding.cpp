/* torch.ops.megatron_cc: checks, and calls of the C interface. Only torch's stable ABI, so that one build serves every
 * torch of the supported range. Every operator writes into tensors that its caller made. */
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifdef MCC_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#include <vector>

#include "mcc.h"

/* A test runs the CUDA kernels' sources on the CPU, under a name of their own. */
#ifdef MCC_EMULATED
#define MCC_NAMESPACE megatron_cc_emulated
#define MCC_CPU_DEVICE Emulated
#else
#define MCC_NAMESPACE megatron_cc
#define MCC_CPU_DEVICE Cpu
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int dtype_of(const Tensor &t, const char *what) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return MCC_FP32;
    case ScalarType::BFloat16:
      return MCC_BF16;
    case ScalarType::Half:
      return MCC_FP16;
    default:
      STD_TORCH_CHECK(false, what, " must be fp32, bf16 or fp16");
  }
  return -1;
}

void check_plain(const Tensor &t, const char *what) { STD_TORCH_CHECK(t.is_contiguous(), what, " must be contiguous"); }

void check_fp32(const Tensor &t, const char *what) {
  check_plain(t, what);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, what, " must be fp32");
}

void check_same(const Tensor &a, const Tensor &b, const char *what) {
  check_plain(a, what);
  STD_TORCH_CHECK(a.numel() == b.numel() && a.scalar_type() == b.scalar_type(), what,
                  " must be as large as the input and of its type");
}

int64_t up(int64_t n, int64_t block) { return (n + block - 1) / block * block; }

mcc_grid grid_of(int64_t count, int64_t bits, int64_t layout, int64_t group, int64_t kind, int64_t method, int64_t rotation) {
  STD_TORCH_CHECK(bits >= 1 && bits <= 8, "bits must be 1 to 8, is ", bits);
  STD_TORCH_CHECK(layout >= MCC_GROUP && layout <= MCC_TENSOR, "no such layout of scales: ", layout);
  STD_TORCH_CHECK(kind >= MCC_SYMMETRIC && kind <= MCC_SIGNED, "no such kind of grid: ", kind);
  STD_TORCH_CHECK(method == MCC_MAX || method == MCC_L2, "no such scale method: ", method);
  STD_TORCH_CHECK(rotation == 0 || (rotation >= 8 && rotation <= 1024 && (rotation & (rotation - 1)) == 0),
                  "rotation must be 0 or a power of two from 8 to 1024, is ", rotation);
  if (layout == MCC_GROUP) {
    STD_TORCH_CHECK(group >= 8 && group % 8 == 0, "group must be a multiple of 8, is ", group);
    STD_TORCH_CHECK(!rotation || (group & (group - 1)) == 0, "with a rotation, group must be a power of two");
  } else if (layout == MCC_CHANNEL) {
    STD_TORCH_CHECK(group >= 1 && count % group == 0, "the numbers must divide by the channels, ", group);
    STD_TORCH_CHECK(!rotation, "a rotation mixes channels: their scales cannot be kept apart");
  }
  mcc_grid g = {};
  g.bits = int(bits);
  g.layout = int(layout);
  g.kind = int(kind);
  g.method = int(method);
  g.rotation = int(rotation);
  g.group = group;
  return g;
}

/* Codes and scales of ``coded`` numbers on a grid. */
void check_stream(const mcc_grid &g, int64_t coded, const Tensor &codes, const Tensor &scales) {
  check_plain(codes, "codes");
  check_plain(scales, "scales");
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.numel() == up(coded, 8) / 8 * g.bits,
                  "codes must be uint8, ceil(n / 8) * bits long");
  int64_t groups = g.layout == MCC_GROUP ? (coded + g.group - 1) / g.group : g.layout == MCC_CHANNEL ? g.group : 1;
  groups *= g.kind == MCC_MINMAX ? 2 : 1;
  STD_TORCH_CHECK(scales.numel() == groups && scales.scalar_type() != ScalarType::Half,
                  "scales must be fp32 or bf16, ", groups, " of them");
}

mcc_codec codec_of(const mcc_grid &g, int64_t count, int64_t coded, const Tensor &codes, const Tensor &scales) {
  check_stream(g, coded, codes, scales);
  mcc_codec c = {};
  c.grid = g;
  c.codes = static_cast<uint8_t *>(codes.data_ptr());
  c.scales = scales.data_ptr();
  c.scale_dtype = dtype_of(scales, "scales");
  c.count = count;
  return c;
}

mcc_codec codec_of(int64_t count, const Tensor &codes, const Tensor &scales, int64_t bits, int64_t layout, int64_t group,
                   int64_t kind, int64_t method, int64_t rotation) {
  const mcc_grid g = grid_of(count, bits, layout, group, kind, method, rotation);
  return codec_of(g, count, rotation ? up(count, rotation) : count, codes, scales);
}

void set_input(mcc_codec &c, const Tensor &x, const Tensor &other, int64_t role) {
  check_plain(x, "x");
  STD_TORCH_CHECK(role >= MCC_PLAIN && role <= MCC_FEEDBACK, "no such role: ", role);
  c.x = x.data_ptr();
  c.x_dtype = dtype_of(x, "x");
  c.role = int(role);
  if (role == MCC_PLAIN) return;
  check_plain(other, "the reference or residual");
  STD_TORCH_CHECK(other.numel() == x.numel(), "the reference or residual must be as large as x");
  c.other = other.data_ptr();
  c.other_dtype = dtype_of(other, "the reference or residual");
}

void set_output(mcc_codec &c, const Tensor &out, const Tensor &other, int64_t role) {
  check_plain(out, "out");
  STD_TORCH_CHECK(role == MCC_PLAIN || role == MCC_DELTA || role == MCC_ADD, "no such role: ", role);
  STD_TORCH_CHECK(role != MCC_ADD || out.scalar_type() == ScalarType::Float, "out must be fp32 to accumulate in");
  c.out = out.data_ptr();
  c.out_dtype = dtype_of(out, "out");
  c.role = int(role);
  if (role != MCC_DELTA) return;
  check_plain(other, "the reference");
  STD_TORCH_CHECK(other.numel() == out.numel(), "the reference must be as large as out");
  c.other = other.data_ptr();
  c.other_dtype = dtype_of(other, "the reference");
}

uint8_t *map_of(const Tensor &map, int64_t count, const char *what) {
  check_plain(map, what);
  STD_TORCH_CHECK(map.scalar_type() == ScalarType::Byte && map.numel() == up(count, 8) / 8, what,
                  " must be uint8, a bit for each of ", count);
  return static_cast<uint8_t *>(map.data_ptr());
}

/* Blocks of some numbers that are rotated by a map; ``block`` 0: none are. */
void set_blocks(mcc_codec &c, const Tensor &rotated, int64_t block, double ratio) {
  if (!block) return;
  STD_TORCH_CHECK(!c.grid.rotation, "either all blocks are rotated or some");
  STD_TORCH_CHECK(ratio == 0 || ratio >= 1, "ratio must be 0 or at least 1, is ", ratio);
  c.grid.rotation = int(block);
  c.tiles.some = 1;
  c.tiles.ratio = float(ratio);
  c.tiles.rotated = map_of(rotated, c.count / block, "rotated");
}

void check_tile(const mcc_grid &g, int64_t tile) {
  STD_TORCH_CHECK(g.layout == MCC_GROUP && tile >= 8 && tile % g.group == 0 && (!g.rotation || tile % g.rotation == 0),
                  "a tile must be whole groups and whole blocks, is ", tile);
}

/* The codec of a message that decides by tiles; ``tile`` 0: none has one bit more. */
mcc_codec tiled_codec_of(int64_t count, const Tensor &codes, const Tensor &scales, const Tensor &wide_codes,
                         const Tensor &wide_scales, const Tensor &rotated, const Tensor &marked, int64_t bits, int64_t layout,
                         int64_t group, int64_t kind, int64_t method, int64_t rotation, int64_t block, double ratio,
                         int64_t wide_kind, int64_t tile, int64_t more) {
  mcc_grid g = grid_of(count, bits, layout, group, kind, method, rotation);
  if (block) grid_of(count, bits, layout, group, kind, method, block);
  const int64_t coded = rotation ? up(count, rotation) : count;
  if (tile) {
    check_tile(g, tile);
    STD_TORCH_CHECK(more >= 1 && more <= coded / tile, "more must be 1 to ", coded / tile, ", is ", more);
  }
  mcc_codec c = codec_of(g, count, tile ? coded - more * tile : coded, codes, scales);
  if (tile) {
    c.tiles.wide = grid_of(count, bits + 1, layout, group, wide_kind, method, rotation);
    check_stream(c.tiles.wide, more * tile, wide_codes, wide_scales);
    STD_TORCH_CHECK(wide_scales.scalar_type() == scales.scalar_type(), "all scales must have one type");
    c.tiles.marked = map_of(marked, coded / tile, "marked");
    c.tiles.wide_codes = static_cast<uint8_t *>(wide_codes.data_ptr());
    c.tiles.wide_scales = wide_scales.data_ptr();
    c.tiles.tile = tile;
    c.tiles.more = more;
  }
  set_blocks(c, rotated, block, ratio);
  if (tile) c.tiles.wide.rotation = c.grid.rotation;
  return c;
}

/* What a call runs in, on the device of a tensor. */
struct Call {
  mcc_context context = {};
  const Tensor &like;
  std::vector<Tensor> kept;

  void done() const {} /* after the kernels were started */

  explicit Call(const Tensor &t) : like(t) {
    context.owner = this;
    context.workspace = [](void *owner, size_t bytes) -> void * {
      Call &self = *static_cast<Call *>(owner);
      self.kept.push_back(torch::stable::new_empty(self.like, {int64_t(bytes)}, ScalarType::Byte));
      return self.kept.back().data_ptr();
    };
  }
};

struct Cpu : Call {
  using Call::Call;
  static constexpr bool kReadable = true; /* this code may look at what lies in tensors */
  const mcc_table *operator->() const { return mcc_cpu(nullptr); }
};

#ifdef MCC_EMULATED
struct Emulated : Call {
  using Call::Call;
  static constexpr bool kReadable = true;
  const mcc_table *operator->() const { return mcc_cuda(); }
};
#elif defined(MCC_CUDA)
struct Cuda : Call {
  torch::stable::accelerator::DeviceGuard guard;
  static constexpr bool kReadable = false;
  explicit Cuda(const Tensor &t) : Call(t), guard(t.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &context.stream));
  }
  const mcc_table *operator->() const { return mcc_cuda(); }
  void done() const {
    const char *problem = mcc_cuda_error();
    STD_TORCH_CHECK(problem == nullptr, "a kernel could not be started: ", problem);
  }
};
#endif

template <class Device>
void quantize_pack(const Tensor &x, const Tensor &other, const Tensor &codes, const Tensor &scales, int64_t role,
                   int64_t bits, int64_t layout, int64_t group, int64_t kind, int64_t method, int64_t rotation,
                   bool stochastic, int64_t seed) {
  mcc_codec c = codec_of(x.numel(), codes, scales, bits, layout, group, kind, method, rotation);
  set_input(c, x, other, role);
  c.grid.stochastic = stochastic;
  c.grid.seed = uint64_t(seed);
  Device device(x);
  device->quantize(&device.context, &c);
  device.done();
}

template <class Device>
void unpack_dequantize(const Tensor &codes, const Tensor &scales, const Tensor &other, const Tensor &out, int64_t role,
                       int64_t bits, int64_t layout, int64_t group, int64_t kind, int64_t method, int64_t rotation) {
  mcc_codec c = codec_of(out.numel(), codes, scales, bits, layout, group, kind, method, rotation);
  set_output(c, out, other, role);
  Device device(out);
  device->dequantize(&device.context, &c);
  device.done();
}

template <class Device>
void quantize_tiles(const Tensor &x, const Tensor &other, const Tensor &codes, const Tensor &scales, const Tensor &wide_codes,
                    const Tensor &wide_scales, const Tensor &rotated, const Tensor &marked, int64_t role, int64_t bits,
                    int64_t layout, int64_t group, int64_t kind, int64_t method, int64_t rotation, int64_t block,
                    double ratio, int64_t wide_kind, int64_t tile, int64_t more, bool stochastic, int64_t seed,
                    int64_t wide_seed) {
  mcc_codec c = tiled_codec_of(x.numel(), codes, scales, wide_codes, wide_scales, rotated, marked, bits, layout, group, kind,
                               method, rotation, block, ratio, wide_kind, tile, more);
  set_input(c, x, other, role);
  c.grid.stochastic = c.tiles.wide.stochastic = stochastic;
  c.grid.seed = uint64_t(seed);
  c.tiles.wide.seed = uint64_t(wide_seed);
  Device device(x);
  device->quantize(&device.context, &c);
  device.done();
}

template <class Device>
void dequantize_tiles(const Tensor &codes, const Tensor &scales, const Tensor &wide_codes, const Tensor &wide_scales,
                      const Tensor &rotated, const Tensor &marked, const Tensor &out, int64_t role, int64_t bits,
                      int64_t layout, int64_t group, int64_t kind, int64_t method, int64_t rotation, int64_t block,
                      int64_t wide_kind, int64_t tile, int64_t more) {
  STD_TORCH_CHECK(role == MCC_PLAIN || role == MCC_ADD, "no such role: ", role);
  mcc_codec c = tiled_codec_of(out.numel(), codes, scales, wide_codes, wide_scales, rotated, marked, bits, layout, group,
                               kind, method, rotation, block, 0.0, wide_kind, tile, more);
  set_output(c, out, out, role);
  Device device(out);
  device->dequantize(&device.context, &c);
  device.done();
}

template <class Device>
void tile_errors(const Tensor &x, const Tensor &other, const Tensor &rotated, const Tensor &errors, int64_t role,
                 int64_t bits, int64_t group, int64_t kind, int64_t method, int64_t rotation, int64_t block, double ratio,
                 int64_t tile) {
  const int64_t count = x.numel();
  mcc_codec c = {};
  c.grid = grid_of(count, bits, MCC_GROUP, group, kind, method, rotation);
  if (block) grid_of(count, bits, MCC_GROUP, group, kind, method, block);
  check_tile(c.grid, tile);
  check_fp32(errors, "errors");
  STD_TORCH_CHECK(errors.numel() == (rotation ? up(count, rotation) : count) / tile, "errors must be one for each whole tile");
  c.count = count;
  c.tiles.tile = tile;
  c.tiles.more = errors.numel();
  set_input(c, x, other, role);
  set_blocks(c, rotated, block, ratio);
  Device device(x);
  device->tile_errors(&device.context, &c, static_cast<float *>(errors.data_ptr()));
  device.done();
}

template <class Device>
void mark_tiles(const Tensor &indices, const Tensor &map) {
  check_plain(indices, "indices");
  check_plain(map, "map");
  const int64_t n = indices.numel();
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long && map.scalar_type() == ScalarType::Byte,
                  "indices must be int64 and map uint8");
  const int64_t *at = static_cast<const int64_t *>(indices.data_ptr());
  if constexpr (Device::kReadable)
    STD_TORCH_CHECK(n == 0 || (at[0] >= 0 && at[n - 1] < 8 * map.numel()), "indices reach beyond the map");
  Device device(map);
  device->mark_tiles(&device.context, at, n, static_cast<uint8_t *>(map.data_ptr()), map.numel());
  device.done();
}

template <class Device>
void abs_topk(const Tensor &x, const Tensor &indices) {
  check_fp32(x, "x");
  check_plain(indices, "indices");
  STD_TORCH_CHECK(x.dim() == 2 && indices.dim() == 2 && indices.size(0) == x.size(0) && indices.size(1) <= x.size(1) &&
                      indices.scalar_type() == ScalarType::Long,
                  "x must be (k, n) and indices int64, (k, count) with count <= n");
  Device device(x);
  device->abs_topk(&device.context, static_cast<const float *>(x.data_ptr()), x.size(0), x.size(1), indices.size(1),
                             static_cast<int64_t *>(indices.data_ptr()));
  device.done();
}

template <class Device>
void dilate(const Tensor &mask, int64_t radius, const Tensor &out) {
  check_plain(mask, "mask");
  check_same(out, mask, "out");
  STD_TORCH_CHECK(mask.dim() == 2 && mask.scalar_type() == ScalarType::Bool && radius >= 0,
                  "mask must be bool, (k, n), and radius at least 0");
  Device device(mask);
  device->dilate(&device.context, static_cast<const uint8_t *>(mask.data_ptr()), mask.size(0), mask.size(1), radius,
                           static_cast<uint8_t *>(out.data_ptr()));
  device.done();
}

template <class Device>
void check_places(const Tensor &x, const Tensor &indices, const Tensor &packed) {
  check_fp32(x, "x");
  check_fp32(packed, "packed");
  check_plain(indices, "indices");
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long && indices.numel() == packed.numel(),
                  "indices must be int64, one for each packed number");
  if constexpr (Device::kReadable) {
    /* They ascend, so the ends tell whether all lie inside. CUDA kernels leave out those that do not. */
    const int64_t n = indices.numel();
    const int64_t *at = static_cast<const int64_t *>(indices.data_ptr());
    STD_TORCH_CHECK(n == 0 || (at[0] >= 0 && at[n - 1] < x.numel()), "indices reach beyond x");
  }
}

template <class Device>
void gather_packed(const Tensor &x, const Tensor &indices, const Tensor &packed) {
  check_places<Device>(x, indices, packed);
  Device device(x);
  device->gather(&device.context, static_cast<const float *>(x.data_ptr()), x.numel(),
                 static_cast<const int64_t *>(indices.data_ptr()), indices.numel(), static_cast<float *>(packed.data_ptr()));
  device.done();
}

template <class Device>
void scatter_add_packed(const Tensor &x, const Tensor &indices, const Tensor &packed) {
  check_places<Device>(x, indices, packed);
  Device device(x);
  device->scatter_add(&device.context, static_cast<float *>(x.data_ptr()), x.numel(),
                      static_cast<const int64_t *>(indices.data_ptr()), indices.numel(),
                      static_cast<const float *>(packed.data_ptr()));
  device.done();
}

template <class Device>
void finite_norm(const Tensor &x, const Tensor &out) {
  check_plain(x, "x");
  check_plain(out, "out");
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Double && out.numel() == 2, "out must be fp64, 2 long");
  Device device(x);
  device->finite_norm(&device.context, x.data_ptr(), dtype_of(x, "x"), x.numel(), static_cast<double *>(out.data_ptr()));
  device.done();
}

template <class Device>
void sample_histogram(const Tensor &x, int64_t stride, const Tensor &counts, const Tensor &range) {
  check_plain(x, "x");
  check_plain(counts, "counts");
  check_plain(range, "range");
  STD_TORCH_CHECK(stride >= 1 && counts.scalar_type() == ScalarType::Long && counts.numel() >= 1 &&
                      range.scalar_type() == ScalarType::Double && range.numel() == 2,
                  "stride must be at least 1, counts int64 and range fp64, 2 long");
  Device device(x);
  device->histogram(&device.context, x.data_ptr(), dtype_of(x, "x"), x.numel(), stride, counts.numel(),
                              static_cast<int64_t *>(counts.data_ptr()), static_cast<double *>(range.data_ptr()));
  device.done();
}

template <class Device>
void orthonormalize(const Tensor &x, const Tensor &q) {
  check_fp32(x, "x");
  check_same(q, x, "q");
  STD_TORCH_CHECK(x.dim() == 3 && x.size(1) >= x.size(2), "x must be (k, n, r) with n >= r");
  Device device(x);
  device->orthonormalize(&device.context, static_cast<const float *>(x.data_ptr()), x.size(0), x.size(1), x.size(2),
                                   static_cast<float *>(q.data_ptr()));
  device.done();
}

float *stats(const Tensor &t, const Tensor &x, const char *what) {
  check_fp32(t, what);
  STD_TORCH_CHECK(t.numel() == x.size(0), what, " must have one number for each row");
  return static_cast<float *>(t.data_ptr());
}

template <class Device>
void cross_entropy(const Tensor &logits, const Tensor &labels, int64_t valid, const Tensor &lse,
                   std::optional<Tensor> target, std::optional<Tensor> weights) {
  check_plain(logits, "logits");
  check_plain(labels, "labels");
  STD_TORCH_CHECK(logits.dim() == 2 && valid >= 0 && valid <= logits.size(1), "logits must be (tokens, columns) and valid at most columns");
  STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Long && labels.numel() == logits.size(0),
                  "labels must be int64, one for each token");
  const int64_t *at = static_cast<const int64_t *>(labels.data_ptr());
  if constexpr (Device::kReadable)
    for (int64_t i = 0; i < labels.numel(); ++i)
      STD_TORCH_CHECK(at[i] < valid, "label ", at[i], " of token ", i, " is beyond the ", valid, " columns that count");
  Device device(logits);
  device->cross_entropy(&device.context, logits.data_ptr(), dtype_of(logits, "logits"), logits.size(0), logits.size(1), valid, at,
                        stats(lse, logits, "lse"), target ? stats(*target, logits, "target") : nullptr,
                        weights ? stats(*weights, logits, "weights") : nullptr);
  device.done();
}

const int64_t *check_choices(const Tensor &rows, const Tensor &places, const Tensor &tokens, const char *what) {
  check_plain(rows, "rows");
  check_plain(places, "places");
  check_plain(tokens, what);
  STD_TORCH_CHECK(rows.dim() == 2 && tokens.dim() == 2 && rows.size(1) == tokens.size(1) &&
                      rows.scalar_type() == tokens.scalar_type(),
                  "rows and ", what, " must be of one type and as wide");
  STD_TORCH_CHECK(places.scalar_type() == ScalarType::Long && places.dim() == 2 && places.size(0) == tokens.size(0),
                  "places must be int64, (tokens, k)");
  return static_cast<const int64_t *>(places.data_ptr());
}

float *of_choices(const Tensor &t, const Tensor &places, const char *what) {
  check_fp32(t, what);
  STD_TORCH_CHECK(t.numel() == places.numel(), what, " must have one number for each place");
  return static_cast<float *>(t.data_ptr());
}

template <class Device>
void combine_rows(const Tensor &rows, const Tensor &places, std::optional<Tensor> weights, const Tensor &out) {
  const int64_t *at = check_choices(rows, places, out, "out");
  Device device(rows);
  device->combine_rows(&device.context, rows.data_ptr(), dtype_of(rows, "rows"), rows.size(0), rows.size(1), at,
                       weights ? of_choices(*weights, places, "weights") : nullptr, places.size(0), places.size(1),
                       out.data_ptr());
  device.done();
}

template <class Device>
void combine_rows_back(const Tensor &grad, const Tensor &rows, const Tensor &places, const Tensor &weights,
                       const Tensor &grad_rows, const Tensor &grad_weights) {
  const int64_t *at = check_choices(rows, places, grad, "grad");
  check_same(grad_rows, rows, "grad_rows");
  Device device(rows);
  device->combine_rows_back(&device.context, grad.data_ptr(), rows.data_ptr(), dtype_of(rows, "rows"), rows.size(0),
                            rows.size(1), at, of_choices(weights, places, "weights"), places.size(0), places.size(1),
                            grad_rows.data_ptr(), of_choices(grad_weights, places, "grad_weights"));
  device.done();
}

mcc_float8 float8_of(int64_t count, const Tensor &codes, const Tensor &scales, int64_t mantissa, int64_t group) {
  STD_TORCH_CHECK(mantissa == 2 || mantissa == 3, "the mantissa must have 2 or 3 bits, has ", mantissa);
  STD_TORCH_CHECK(group >= 1, "group must be at least 1, is ", group);
  check_plain(codes, "codes");
  check_plain(scales, "scales");
  const int64_t groups = (count + group - 1) / group;
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.numel() == count, "codes must be uint8, one for each number");
  STD_TORCH_CHECK(scales.numel() == groups && scales.scalar_type() != ScalarType::Half,
                  "scales must be fp32, bf16 or uint8 (powers of two), one for each of ", groups, " groups");
  mcc_float8 c = {};
  c.codes = static_cast<uint8_t *>(codes.data_ptr());
  c.scales = scales.data_ptr();
  c.scale_dtype = scales.scalar_type() == ScalarType::Byte ? int(MCC_E8M0) : dtype_of(scales, "scales");
  c.count = count;
  c.group = group;
  c.mantissa = int(mantissa);
  return c;
}

template <class Device>
void float8_encode(const Tensor &x, const Tensor &codes, const Tensor &scales, int64_t mantissa, int64_t group,
                   bool stochastic, int64_t seed) {
  check_plain(x, "x");
  mcc_float8 c = float8_of(x.numel(), codes, scales, mantissa, group);
  c.x = x.data_ptr();
  c.x_dtype = dtype_of(x, "x");
  c.stochastic = stochastic;
  c.seed = uint64_t(seed);
  Device device(x);
  device->float8_encode(&device.context, &c);
  device.done();
}

template <class Device>
void float8_decode(const Tensor &codes, const Tensor &scales, const Tensor &out, int64_t mantissa, int64_t group,
                   int64_t added) {
  check_plain(out, "out");
  STD_TORCH_CHECK(added >= -1 && added <= 1, "added must be -1, 0 or 1, is ", added);
  STD_TORCH_CHECK(!added || out.scalar_type() == ScalarType::Float, "out must be fp32 to accumulate in");
  mcc_float8 c = float8_of(out.numel(), codes, scales, mantissa, group);
  c.out = out.data_ptr();
  c.out_dtype = dtype_of(out, "out");
  c.added = int(added);
  Device device(out);
  device->float8_decode(&device.context, &c);
  device.done();
}

/* Which sources this was compiled from (setup.py). */
#ifndef MCC_SOURCES
#define MCC_SOURCES 0ll
#endif
int64_t sources() { return MCC_SOURCES; }

}  // namespace

STABLE_TORCH_LIBRARY(MCC_NAMESPACE, m) {
  m.def(
      "quantize_pack(Tensor x, Tensor(a!) other, Tensor(b!) codes, Tensor(c!) scales, int role, int bits, int layout, "
      "int group, int kind, int method, int rotation, bool stochastic, int seed) -> ()");
  m.def(
      "unpack_dequantize(Tensor codes, Tensor scales, Tensor(a!) other, Tensor(b!) out, int role, int bits, int layout, "
      "int group, int kind, int method, int rotation) -> ()");
  m.def("sources() -> int");
  m.def("abs_topk(Tensor x, Tensor(a!) indices) -> ()");
  m.def("dilate(Tensor mask, int radius, Tensor(a!) out) -> ()");
  m.def("gather_packed(Tensor x, Tensor indices, Tensor(a!) packed) -> ()");
  m.def("scatter_add_packed(Tensor(a!) x, Tensor indices, Tensor packed) -> ()");
  m.def("finite_norm(Tensor x, Tensor(a!) out) -> ()");
  m.def("sample_histogram(Tensor x, int stride, Tensor(a!) counts, Tensor(b!) range) -> ()");
  m.def("orthonormalize(Tensor x, Tensor(a!) q) -> ()");
  m.def(
      "cross_entropy(Tensor(a!) logits, Tensor labels, int valid, Tensor(b!) lse, Tensor(c!)? target, Tensor? weights) "
      "-> ()");
  m.def("combine_rows(Tensor rows, Tensor places, Tensor? weights, Tensor(a!) out) -> ()");
  m.def(
      "combine_rows_back(Tensor grad, Tensor rows, Tensor places, Tensor weights, Tensor(a!) grad_rows, "
      "Tensor(b!) grad_weights) -> ()");
  m.def(
      "float8_encode(Tensor x, Tensor(a!) codes, Tensor(b!) scales, int mantissa, int group, bool stochastic, int seed) "
      "-> ()");
  m.def("float8_decode(Tensor codes, Tensor scales, Tensor(a!) out, int mantissa, int group, int added) -> ()");
  m.def(
      "quantize_tiles(Tensor x, Tensor(a!) other, Tensor(b!) codes, Tensor(c!) scales, Tensor(d!) wide_codes, "
      "Tensor(e!) wide_scales, Tensor(f!) rotated, Tensor marked, int role, int bits, int layout, int group, int kind, "
      "int method, int rotation, int block, float ratio, int wide_kind, int tile, int more, bool stochastic, int seed, "
      "int wide_seed) -> ()");
  m.def(
      "dequantize_tiles(Tensor codes, Tensor scales, Tensor wide_codes, Tensor wide_scales, Tensor rotated, Tensor marked, "
      "Tensor(a!) out, int role, int bits, int layout, int group, int kind, int method, int rotation, int block, "
      "int wide_kind, int tile, int more) -> ()");
  m.def(
      "tile_errors(Tensor x, Tensor other, Tensor(a!) rotated, Tensor(b!) errors, int role, int bits, int group, int kind, "
      "int method, int rotation, int block, float ratio, int tile) -> ()");
  m.def("mark_tiles(Tensor indices, Tensor(a!) map) -> ()");
}

template <class Device>
void implement(torch::stable::detail::StableLibrary &m) {
  m.impl("quantize_pack", TORCH_BOX(&quantize_pack<Device>));
  m.impl("unpack_dequantize", TORCH_BOX(&unpack_dequantize<Device>));
  m.impl("abs_topk", TORCH_BOX(&abs_topk<Device>));
  m.impl("dilate", TORCH_BOX(&dilate<Device>));
  m.impl("gather_packed", TORCH_BOX(&gather_packed<Device>));
  m.impl("scatter_add_packed", TORCH_BOX(&scatter_add_packed<Device>));
  m.impl("finite_norm", TORCH_BOX(&finite_norm<Device>));
  m.impl("sample_histogram", TORCH_BOX(&sample_histogram<Device>));
  m.impl("orthonormalize", TORCH_BOX(&orthonormalize<Device>));
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy<Device>));
  m.impl("combine_rows", TORCH_BOX(&combine_rows<Device>));
  m.impl("combine_rows_back", TORCH_BOX(&combine_rows_back<Device>));
  m.impl("float8_encode", TORCH_BOX(&float8_encode<Device>));
  m.impl("float8_decode", TORCH_BOX(&float8_decode<Device>));
  m.impl("quantize_tiles", TORCH_BOX(&quantize_tiles<Device>));
  m.impl("dequantize_tiles", TORCH_BOX(&dequantize_tiles<Device>));
  m.impl("tile_errors", TORCH_BOX(&tile_errors<Device>));
  m.impl("mark_tiles", TORCH_BOX(&mark_tiles<Device>));
}

STABLE_TORCH_LIBRARY_IMPL(MCC_NAMESPACE, CompositeExplicitAutograd, m) { m.impl("sources", TORCH_BOX(&sources)); }

STABLE_TORCH_LIBRARY_IMPL(MCC_NAMESPACE, CPU, m) { implement<MCC_CPU_DEVICE>(m); }

#if defined(MCC_CUDA) && !defined(MCC_EMULATED)
STABLE_TORCH_LIBRARY_IMPL(MCC_NAMESPACE, CUDA, m) { implement<Cuda>(m); }
#endif
