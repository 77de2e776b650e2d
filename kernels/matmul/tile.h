// A tile of results in registers, and what all formats do to fill it.
#pragma once

#include "kernels/matmul/format.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

constexpr int kStreamAhead = 2560;  // bytes: about what memory delivers while one line is on its way

// Tokens first .. first + kTokens times kVectors vectors of rows, the first of them `vector`.
template <int kTokens, int kVectors>
struct Tile {
  F sums[kTokens][kVectors];

  QUIRE_INLINE void clear_all(Tile& tile) {
    QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) tile.sums[t][v] = zero();
    }
  }
  QUIRE_INLINE void store_all(const Tile& tile, float* out, int vector) {
    QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++)
          store(out + t * kPanelRows + (vector + v) * kLanes, tile.sums[t][v]);
    }
  }
};

template <int kBytes>
QUIRE_INLINE void stream_ahead(const uint8_t* at) {
  QUIRE_UNROLL for (int i = 0; i < kBytes; i += 64) prefetch(at + kStreamAhead + i);
}

// What the next work reads, fetched evenly while tiles are computed: at once it would only be waited for.
struct Fetch {
  const uint8_t* at;
  const uint8_t* end;
  uint32_t pace = 0;  // bytes to fetch for each byte read, in units of 2^-16
  uint32_t due = 0;   // in the same units
};

// Tells that `bytes` of the panel, all rows, are being read.
QUIRE_INLINE void fetch_beside(Fetch& fetch, uint32_t bytes) {
  constexpr uint32_t kLine = 64u << 16;
  for (fetch.due += bytes * fetch.pace; fetch.due >= kLine && fetch.at < fetch.end; fetch.due -= kLine) {
    prefetch_far(fetch.at);
    fetch.at += 64;
  }
}

// dots = 32 nibbles of each row times 32 int8 of each token, which lie `k` apart.
template <int kTokens, int kVectors>
QUIRE_INLINE void multiply_nibbles(const uint8_t* w, const int8_t* x, int k, NibbleDot (&dots)[kTokens][kVectors]) {
  QUIRE_UNROLL for (int t = 0; t < kTokens; t++) { QUIRE_UNROLL for (int v = 0; v < kVectors; v++) clear(dots[t][v]); }
  QUIRE_UNROLL for (int quad = 0; quad < 4; quad++) {
    B bytes[kVectors], weights[kVectors];
    QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
      bytes[v] = load_bytes(w + quad * 128 + v * kLanes * 4);
      weights[v] = low_nibbles(bytes[v]);
    }
    QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
      const B values = splat_quad(x + size_t(t) * k + quad * 4);
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) accumulate(dots[t][v], weights[v], values);
    }
    QUIRE_UNROLL for (int v = 0; v < kVectors; v++) weights[v] = high_nibbles(bytes[v]);
    QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
      const B values = splat_quad(x + size_t(t) * k + quad * 4 + 16);
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) accumulate(dots[t][v], weights[v], values);
    }
  }
}

}  // namespace quire::QUIRE_ISA
