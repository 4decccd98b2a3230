// The rank-R spectral summary of complete pages, and the new token that completes one.
//
// The keys are read once from memory (a second time from the first-level cache).  A warp works on UNITS pages of one KV head:
//  1. Gram matrix of the PAGE keys by tensor cores, centred afterwards in fp32 (rows and columns minus their means).
//  2. Its leading eigenvectors, eigen.cuh.
//  3. V = D^T U / sqrt(lambda) by tensor cores, with U split in two 16-bit halves.
//  4. Quantised as reference.quantise does, and packed.
#pragma once
#include "eigen.cuh"

constexpr int TILES = PAGE / 16;

__device__ __forceinline__ float scale_of(float largest, float bound) { return round_bf16(fmaxf(largest / bound, 1e-8f)); }
__device__ __forceinline__ int quantise(float x, float inverse_scale, int lowest, int highest) {
    return min(max(__float2int_rn(x * inverse_scale), lowest), highest);
}

__device__ __forceinline__ void gram_matrix(float (&gram)[PAGE][PAGE + 1], const uint16* keys, int64 token_stride, int row, int quad) {
    float c[TILES][2 * TILES][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < D / 32; ++chunk) {
        uint4 k[2 * TILES];
#pragma unroll
        for (int block = 0; block < 2 * TILES; ++block)
            k[block] = *reinterpret_cast<const uint4*>(keys + (8 * block + row) * token_stride + 32 * chunk + 8 * quad);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < 2 * TILES; ++j) {
                mma(c[i][j], k[2 * i].x, k[2 * i + 1].x, k[2 * i].y, k[2 * i + 1].y, k[j].x, k[j].y);
                mma(c[i][j], k[2 * i].z, k[2 * i + 1].z, k[2 * i].w, k[2 * i + 1].w, k[j].z, k[j].w);
            }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2 * TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) gram[16 * i + row + e / 2 * 8][8 * j + 2 * quad + e % 2] = c[i][j][e];
}

template <int SLOTS>
__device__ __forceinline__ void store_coefficients(const Scratch<SLOTS>& scratch, int unit, int token, uint8* record) {
    float values[R], largest = 0.f;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        values[r] = scratch.vectors[unit][r][token] * scratch.singular[unit][r];
        largest = fmaxf(largest, fabsf(values[r]));
    }
    const float scale = scale_of(largest, 127.f), inverse = 1.f / scale;
#pragma unroll
    for (int r = 0; r < R; r += 2) {
        const int low = quantise(values[r], inverse, -127, 127), high = quantise(values[r + 1], inverse, -127, 127);
        *reinterpret_cast<uint16*>(record + COEFFICIENTS_AT + token * R + r) = static_cast<uint16>((low & 0xff) | (high & 0xff) << 8);
    }
    *reinterpret_cast<uint16*>(record + COEFFICIENT_SCALE_AT + 2 * token) = static_cast<uint16>(__float_as_uint(scale) >> 16);
}

// Centroid and basis, the whole warp for one page.  Lane (row, quad) reads channels 64 c + 8 row ... + 7 of tokens 2 quad, + 1,
// + 8, + 9 of a tile, and gets basis vector `row` at channels 64 c + 16 quad ... + 15.
template <int SLOTS>
__device__ __forceinline__ void store_basis(Scratch<SLOTS>& scratch, int unit, const uint16* keys, int64 token_stride, uint8* record,
                                            int row, int quad) {
    uint32 a[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* u = &scratch.vectors[unit][row < R ? row : 0][16 * tile + 8 * half + 2 * quad];
            const float u0 = row < R ? u[0] : 0.f, u1 = row < R ? u[1] : 0.f;
            a[tile][2 * half] = pack(u0, u1);
            a[tile][2 * half + 1] = pack(u0 - low_of(a[tile][2 * half]), u1 - high_of(a[tile][2 * half]));
        }
    float basis[D / 64][16], largest_mean = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < D / 64; ++chunk) {
        float c[8][4] = {}, means[8] = {};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            uint4 k[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                k[i] = *reinterpret_cast<const uint4*>(keys + (16 * tile + 2 * quad + i % 2 + i / 2 * 8) * token_stride + 64 * chunk + 8 * row);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int pick = i % 2 ? 0x7632 : 0x5410;
                const uint32 b0 = __byte_perm(word_of(k[0], i / 2), word_of(k[1], i / 2), pick);
                const uint32 b1 = __byte_perm(word_of(k[2], i / 2), word_of(k[3], i / 2), pick);
                mma(c[i], a[tile][0], a[tile][1], a[tile][2], a[tile][3], b0, b1);
                means[i] += low_of(b0) + high_of(b0) + low_of(b1) + high_of(b1);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float mean = quad_sum(means[i]) * (1.f / PAGE);
            largest_mean = fmaxf(largest_mean, fabsf(mean));
            basis[chunk][i] = c[i][0] + c[i][2];
            basis[chunk][8 + i] = c[i][1] + c[i][3];
            if (quad == 0) scratch.mean[64 * chunk + 8 * row + i] = mean;
        }
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) largest_mean = fmaxf(largest_mean, __shfl_xor_sync(ALL_LANES, largest_mean, apart));
    const float mean_scale = scale_of(largest_mean, 127.f), inverse_mean_scale = 1.f / mean_scale;
    __syncwarp();
    if (quad == 0) {
#pragma unroll
        for (int chunk = 0; chunk < D / 64; ++chunk) {
            uint32 packed[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int value = quantise(scratch.mean[64 * chunk + 8 * row + i], inverse_mean_scale, -127, 127);
                packed[i / 4] |= static_cast<uint32>(value & 0xff) << (8 * (i % 4));
            }
            *reinterpret_cast<uint2*>(record + CENTROID_AT + 64 * chunk + 8 * row) = make_uint2(packed[0], packed[1]);
        }
        if (row == 0) *reinterpret_cast<uint16*>(record + CENTROID_SCALE_AT) = static_cast<uint16>(__float_as_uint(mean_scale) >> 16);
    }
    const float sum = row < R ? scratch.vector_sum[unit][row] : 0.f, singular = row < R ? scratch.singular[unit][row] : 0.f;
    const float inverse = singular > 0.f ? 1.f / singular : 0.f;
    float largest = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < D / 64; ++chunk)
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            basis[chunk][i] = (basis[chunk][i] - sum * scratch.mean[64 * chunk + 16 * quad + i]) * inverse;
            largest = fmaxf(largest, fabsf(basis[chunk][i]));
        }
    largest = quad_max(largest);
    const float scale = scale_of(largest, 7.f), inverse_scale = 1.f / scale;
    if (row < R) {
#pragma unroll
        for (int chunk = 0; chunk < D / 64; ++chunk) {
            uint32 packed[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 16; ++i)
                packed[i / 8] |= static_cast<uint32>(quantise(basis[chunk][i], inverse_scale, -8, 7) & 0xf) << (4 * (i % 8));
            *reinterpret_cast<uint2*>(record + BASIS_AT + row * (D / 2) + 32 * chunk + 8 * quad) = make_uint2(packed[0], packed[1]);
        }
        if (quad == 0) *reinterpret_cast<uint16*>(record + BASIS_SCALE_AT + 2 * row) = static_cast<uint16>(__float_as_uint(scale) >> 16);
    }
    __syncwarp();  // the next unit overwrites scratch.mean
}

// Summarises the units that scratch.keys and scratch.record name; the whole warp must call, after a __syncwarp.
template <int SLOTS>
__device__ __forceinline__ void summarise(Scratch<SLOTS>& scratch, int64 token_stride) {
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const Place<SLOTS> at;
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i)
        if (scratch.keys[i]) gram_matrix(scratch.gram[i], scratch.keys[i], token_stride, row, quad);
    __syncwarp();
    const bool live = scratch.keys[at.unit];
    eigenvectors(scratch, at, live);
    for (int token = lane % (32 / SLOTS); live && token < PAGE; token += 32 / SLOTS)
        store_coefficients(scratch, at.unit, token, scratch.record[at.unit]);
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i)
        if (scratch.keys[i]) store_basis(scratch, i, scratch.keys[i], token_stride, scratch.record[i], row, quad);
    __syncwarp();
}

// The new token of each sequence, [B, kv_heads, D] with rows key_stride and value_stride apart, and the pools it goes to, strides in elements.
// slots [B]: a sequence has no new token where its slot is negative; null: all have one.
struct NewTokens {
    uint16 *keys, *values;
    const uint16 *new_keys, *new_values;
    const int64* slots;
    int key_stride, value_stride;  // 64 bits would spill in the scorer
    int64 page_stride, head_stride, token_stride;
};

// Writes the new token of unit `at` = sequence * kv_heads + head at position seq_lens - 1 and summarises the page that it fills.  A
// warp has one unit, since here latency counts.
__device__ __forceinline__ void append_token(Scratch<1>& scratch, const NewTokens& tokens, const int* block_table, const int* seq_lens,
                                             uint8* summaries, int at, int kv_heads, int max_pages, int64 summary_stride) {
    const int lane = threadIdx.x % 32, sequence = at / kv_heads, head = at % kv_heads, length = seq_lens[sequence];
    if (length <= 0 || (tokens.slots && tokens.slots[sequence] < 0)) return;
    const int64 page = block_table[static_cast<int64>(sequence) * max_pages + (length - 1) / PAGE];
    const int64 base = page * tokens.page_stride + head * tokens.head_stride, to = base + (length - 1) % PAGE * tokens.token_stride;
    const auto copy = [&](uint16* pool, const uint16* token, int stride) {
        for (int c = 8 * lane; c < D; c += 256)
            *reinterpret_cast<uint4*>(pool + to + c) =
                *reinterpret_cast<const uint4*>(token + static_cast<int64>(sequence) * stride + head * D + c);
    };
    copy(tokens.keys, tokens.new_keys, tokens.key_stride);
    copy(tokens.values, tokens.new_values, tokens.value_stride);
    if (length % PAGE) return;
    if (lane == 0) scratch.keys[0] = tokens.keys + base, scratch.record[0] = summaries + page * summary_stride + head * RECORD;
    __syncwarp();
    summarise(scratch, tokens.token_stride);
}
