#include "kernels/rope/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kHalfVectors = kPanelVectors / 2;

// 16 pairs of dims from `dim` on.
void store_keys(const QkvTarget& target, uint8_t* keys, int slot, int dim, const float* low, const float* high) {
  if (target.kv_format == kKvF32) {
    float* out = (float*)keys + slot;
    for (int i = 0; i < 16; i++) {
      out[size_t(dim + i) * kBlockTokens] = low[i];
      out[size_t(target.half + dim + i) * kBlockTokens] = high[i];
    }
  } else {
    uint32_t* out = (uint32_t*)keys + slot;
    for (int i = 0; i < 16; i++) {
      out[size_t(dim + i) * kBlockTokens] = uint32_t(to_bf16(high[i])) << 16 | to_bf16(low[i]);
    }
  }
}

// 32 dims from `dim` on. The first token of a block also clears the dims of the tokens to come: attention multiplies
// what lies there by zero.
void store_values(const QkvTarget& target, uint8_t* values, int slot, int dim, const float* x) {
  const int size = 2 * target.half;
  if (target.kv_format == kKvF32) {
    float* out = (float*)values + dim;
    if (slot == 0) {
      for (int t = 1; t < kBlockTokens; t++) memset(out + size_t(t) * size, 0, kPanelRows * sizeof(float));
    }
    memcpy(out + size_t(slot) * size, x, kPanelRows * sizeof(float));
  } else {
    uint16_t* out = (uint16_t*)values + dim * 2;
    if (slot == 0) {
      for (int t = 0; t < kBlockTokens / 2; t++) memset(out + size_t(t) * size * 2, 0, kPanelRows * 4);
    }
    out += size_t(slot / 2) * size * 2 + slot % 2;
    for (int i = 0; i < kPanelRows; i++) out[2 * i] = to_bf16(x[i]);
  }
}

}  // namespace

void rotate_and_store(const QkvTarget& target, const float* sums, int first, int count, int panel, const float* bias) {
  const int panels_per_head = target.half / 16, head = panel / panels_per_head, part = panel % panels_per_head;
  const int dim = part * 16;
  const bool value_head = head >= target.heads + target.kv_heads;
  for (int t = 0; t < count; t++) {
    const int token = first + t, position = target.positions[token], slot = position % kBlockTokens;
    const F scale = splat(target.inverse_rms[token]);
    F x[kPanelVectors];
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      x[v] = mul(load(sums + t * kPanelRows + v * kLanes), scale);
      if (bias) x[v] = add(x[v], load(bias + v * kLanes));
    }
    alignas(64) float plain[kPanelRows];
    if (value_head) {
      QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) store(plain + v * kLanes, x[v]);
      uint8_t* block = target.blocks[token] + target.layer_offset +
                       (head - target.heads - target.kv_heads) * head_bytes(target.kv_format, target.half);
      store_values(target, block + key_bytes(target.kv_format, target.half), slot, part * kPanelRows, plain);
      continue;
    }
    const float* cosines = target.cosines + size_t(position) * target.half + dim;
    const float* sines = target.sines + size_t(position) * target.half + dim;
    QUIRE_UNROLL for (int v = 0; v < kHalfVectors; v++) {
      const F c = load(cosines + v * kLanes), s = load(sines + v * kLanes);
      const F low = x[v], high = x[kHalfVectors + v];
      store(plain + v * kLanes, fnma(high, s, mul(low, c)));
      store(plain + 16 + v * kLanes, fma(low, s, mul(high, c)));
    }
    if (head < target.heads) {
      float* out = target.queries + ((size_t(token) * target.heads + head) * target.half + dim) * 2;
      for (int i = 0; i < 16; i++) {
        out[2 * i] = plain[i] * target.query_scale;
        out[2 * i + 1] = plain[16 + i] * target.query_scale;
      }
    } else {
      uint8_t* block = target.blocks[token] + target.layer_offset +
                       (head - target.heads) * head_bytes(target.kv_format, target.half);
      store_keys(target, block, slot, dim, plain, plain + 16);
    }
  }
}

}  // namespace quire::QUIRE_ISA
