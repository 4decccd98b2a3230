// Exact attention of one KV head over tiles of 16 tokens, a warp a tile, and the merge of what the warps of a cluster found.
//
// Query heads are the 16 rows of the A operand; the contraction axes are permuted so that a 16-byte read from shared memory is
// operands without a shuffle:
//  * keys: lane (row, quad) reads channels 32 c + 8 quad ... + 7 of tokens `row` and `row + 8`: two k-steps each;
//  * values: lane (row, quad) reads channels 64 c + 8 row ... + 7 of tokens 2 quad, + 1, + 8, + 9; one byte-permute packs two
//    tokens of one channel, and the product's column n stands for channel 64 c + 8 n + i.
// Partial results (largest logit, sum, output) meet in shared memory, then each block of the cluster sends every other its slice.
#pragma once
#include "common.cuh"

constexpr int HALVES = G <= 8 ? 1 : 2;      // of the 16 rows in use
constexpr int DV = D < 128 ? D : 128;       // channels of the output that one block computes
constexpr int KEY_CHUNKS = D / 32, VALUE_CHUNKS = DV / 64;
constexpr int KEY_BYTES = 16 * D * 2, TILE_BYTES = KEY_BYTES + 16 * DV * 2;
constexpr int OUTPUTS = G * DV, SLICE = OUTPUTS / CLUSTER;

// Where the 16-byte chunk `chunk` of a token lies in its row of shared memory: no bank is hit twice by the reads above.
__device__ __forceinline__ int swizzled(int token, int chunk) { return chunk ^ (((token >> 1 & 3) << 1) ^ ((token & 1) << 2)); }

template <int CHANNELS>
__device__ __forceinline__ void copy_rows(uint8* to, const uint16* from, int64 token_stride, int lane) {
#pragma unroll
    for (int i = 0; i < 16 * CHANNELS / 8 / 32; ++i) {
        const int at = lane + 32 * i, token = at / (CHANNELS / 8), chunk = at % (CHANNELS / 8);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         shared_address(to + token * CHANNELS * 2 + swizzled(token, chunk) * 16)),
                     "l"(from + token * token_stride + 8 * chunk)
                     : "memory");
    }
}
template <int CHANNELS>
__device__ __forceinline__ uint4 read_chunk(const uint8* rows, int token, int chunk) {
    return *reinterpret_cast<const uint4*>(rows + token * CHANNELS * 2 + swizzled(token, chunk) * 16);
}

struct Partial {
    float largest[HALVES], sum[HALVES];  // of heads row, row + 8; the sum over this lane's tokens only
    float output[8 * VALUE_CHUNKS][4];

    __device__ __forceinline__ Partial() {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) largest[half] = LOWEST, sum[half] = 0.f;
#pragma unroll
        for (int i = 0; i < 8 * VALUE_CHUNKS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) output[i][j] = 0.f;
    }
};

// The query heads of one KV head, [G, D], as A operands.
__device__ __forceinline__ void load_heads(uint32 (&q)[2 * KEY_CHUNKS][4], const uint16* heads, int row, int quad) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; ++c) {
            const int g = row + 8 * half;
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (g < G) raw = *reinterpret_cast<const uint4*>(heads + g * D + 32 * c + 8 * quad);
            q[2 * c][half] = raw.x, q[2 * c][half + 2] = raw.y;
            q[2 * c + 1][half] = raw.z, q[2 * c + 1][half + 2] = raw.w;
        }
}

// Logits of a tile's 16 tokens, of which the first `live` exist, in powers of two.
__device__ __forceinline__ void tile_logits(float (&logits)[2][4], const uint32 (&q)[2 * KEY_CHUNKS][4], const uint8* keys, int live,
                                            int row, int quad) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int j = 0; j < 4; ++j) logits[block][j] = 0.f;
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; ++c) {
            const uint4 k = read_chunk<D>(keys, 8 * block + row, 4 * c + quad);
            mma(logits[block], q[2 * c][0], q[2 * c][1], q[2 * c][2], q[2 * c][3], k.x, k.y);
            mma(logits[block], q[2 * c + 1][0], q[2 * c + 1][1], q[2 * c + 1][2], q[2 * c + 1][3], k.z, k.w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            logits[block][j] = 8 * block + 2 * quad + j % 2 < live ? logits[block][j] * (SOFTMAX_SCALE * LOG2_E) : LOWEST;
    }
}

// Weights of TILES_AT_ONCE tiles, the first of which has a token, as A operands [tile][block][half]; `partial` then is relative to
// the largest logit seen.
template <int TILES_AT_ONCE>
__device__ __forceinline__ void weigh(uint32 (&p)[TILES_AT_ONCE][2][2], Partial& partial, const float (&logits)[TILES_AT_ONCE][2][4]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float next = LOWEST;
#pragma unroll
        for (int i = 0; i < 4 * TILES_AT_ONCE; ++i) next = fmaxf(next, logits[i / 4][i / 2 % 2][2 * half + i % 2]);
        next = fmaxf(partial.largest[half], quad_max(next));
        const float shrink = exp2_fast(partial.largest[half] - next);
        partial.largest[half] = next;
        partial.sum[half] *= shrink;
#pragma unroll
        for (int i = 0; i < 8 * VALUE_CHUNKS; ++i) partial.output[i][2 * half] *= shrink, partial.output[i][2 * half + 1] *= shrink;
#pragma unroll
        for (int i = 0; i < 2 * TILES_AT_ONCE; ++i) {
            const float(&pair)[4] = logits[i / 2][i % 2];
            uint32& weights = p[i / 2][i % 2][half];
            weights = pack(exp2_fast(pair[2 * half] - next), exp2_fast(pair[2 * half + 1] - next));
            // the sum is that of the rounded weights, so that they add to one
            partial.sum[half] += low_of(weights) + high_of(weights);
        }
    }
}

// Adds a tile's values by their weights.
__device__ __forceinline__ void add_values(Partial& partial, const uint32 (&p)[2][2], const uint8* values, int live, int row, int quad) {
#pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; ++c) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 2 * quad + i % 2 + i / 2 * 8;
            v[i] = read_chunk<DV>(values, token, 8 * c + row);
            if (token >= live) v[i] = make_uint4(0, 0, 0, 0);  // whatever lies there, weight 0 times NaN is NaN
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int pick = i % 2 ? 0x7632 : 0x5410;
            const uint32 b0 = __byte_perm(word_of(v[0], i / 2), word_of(v[1], i / 2), pick);
            const uint32 b1 = __byte_perm(word_of(v[2], i / 2), word_of(v[3], i / 2), pick);
            mma(partial.output[8 * c + i], p[0][0], p[0][1], p[1][0], p[1][1], b0, b1);
        }
    }
}

template <int WARPS>
struct Merge {
    float2 warp_weight[WARPS][G];  // largest logit, sum
    float received[CLUSTER][SLICE];
    float received_largest[CLUSTER][G], received_sum[CLUSTER][G];
};

// Puts a warp's part where `merge` reads it.  outputs: [WARPS][G][DV].
template <int WARPS>
__device__ __forceinline__ void leave_partial(Merge<WARPS>& memory, const Partial& partial, float* outputs, int warp, int row, int quad) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int g = row + 8 * half;
        const float sum = quad_sum(partial.sum[half]);
        if (g < G) {
            if (quad == 0) memory.warp_weight[warp][g] = make_float2(partial.largest[half], sum);
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c)
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int i = 0; i < 8; i += 4)
                        *reinterpret_cast<float4*>(outputs + (warp * G + g) * DV + 64 * c + 16 * quad + 8 * j + i) =
                            make_float4(partial.output[8 * c + i][2 * half + j], partial.output[8 * c + i + 1][2 * half + j],
                                        partial.output[8 * c + i + 2][2 * half + j], partial.output[8 * c + i + 3][2 * half + j]);
        }
    }
}

// Warps -> block -> cluster -> output.  The whole cluster calls, a block when its warps have left their parts and it knows that all
// others have started.  out [G, D] in front of this block's DV channels, lse [G] (natural log, -inf where there is nothing) or null.
template <int WARPS>
__device__ __forceinline__ void merge(Merge<WARPS>& memory, const float* outputs, uint32 rank, uint16* out, float* lse) {
#pragma unroll
    for (int i = threadIdx.x; i < OUTPUTS; i += 32 * WARPS) {  // warps -> block, sent to the block that owns the slice
        const int g = i / DV;
        float largest = LOWEST, sum = 0.f, value = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, memory.warp_weight[w][g].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_fast(memory.warp_weight[w][g].x - largest);
            sum += weight * memory.warp_weight[w][g].y;
            value += weight * outputs[w * OUTPUTS + i];
        }
        store_to_block(&memory.received[rank][i % SLICE], i / SLICE, value);
        if (i % DV < CLUSTER) {
            store_to_block(&memory.received_largest[rank][g], i % DV, largest);
            store_to_block(&memory.received_sum[rank][g], i % DV, sum);
        }
    }
    cluster_sync();
    for (int i = 2 * threadIdx.x; i < SLICE; i += 64 * WARPS) {  // blocks -> output
        const int at = rank * SLICE + i, g = at / DV, channel = at % DV;
        float largest = LOWEST, sum = 0.f, low = 0.f, high = 0.f;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) largest = fmaxf(largest, memory.received_largest[block][g]);
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            const float weight = exp2_fast(memory.received_largest[block][g] - largest);
            sum += weight * memory.received_sum[block][g];
            low += weight * memory.received[block][i], high += weight * memory.received[block][i + 1];
        }
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        reinterpret_cast<uint32*>(out)[(g * D + channel) / 2] = pack(low * inverse, high * inverse);
        if (lse && channel == 0) lse[g] = sum > 0.f ? (largest + log2_fast(sum)) * LN_2 : __int_as_float(0xff800000);
    }
}
