// Attend: exact softmax attention over the selected pages, split over the blocks of a cluster and merged there.
//
// Bytes: 2 * PAGE * D * 2 per kept page and KV head; at batch 1 it is latency that counts.  A warp takes a tile of 16 tokens:
// all its loads (16 bytes a lane, keys and values) are issued before the arithmetic.  Query heads are the 16 rows of the A
// operand.  The contraction axes are permuted so that loaded registers are operands without a shuffle:
//  * keys: lane (row, quad) holds channels 32 c + 8 quad ... + 7 of tokens `row` and `row + 8`: two k-steps each;
//  * values: lane (row, quad) holds channels 64 c + 8 row ... + 7 of tokens 2 quad, + 1, + 8, + 9; one byte-permute packs two
//    tokens of one channel, and the product's column n stands for channel 64 c + 8 n + i.
// Partial results (largest logit, sum, output) meet first in shared memory, then across the cluster: no second launch.
#include "common.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int ROWS = G <= 8 ? 8 : 16;       // query heads, padded
constexpr int DV = D < 128 ? D : 128;       // channels of the output that one block computes
constexpr int KEY_CHUNKS = D / 32, VALUE_CHUNKS = DV / 64;
constexpr int TILES = PAGE / 16;            // tiles of a page

struct Tile {
    uint4 keys[2][KEY_CHUNKS];       // [token block of 8][chunk]
    uint4 values[4][VALUE_CHUNKS];   // tokens 2 quad, + 1, + 8, + 9
};

__device__ __forceinline__ uint32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// query, out [B, kv_heads * G, D]; keys, values: pools with strides in elements; tables [B, kv_heads, kept] logical pages;
// lse [B, kv_heads * G] natural log, -inf where there is nothing to attend.  grid (cluster blocks, kv_heads * D / DV, B).
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const uint16* __restrict__ query, const uint16* __restrict__ keys, const uint16* __restrict__ values,
           const int* __restrict__ block_table, const int* __restrict__ seq_lens, const int* __restrict__ tables,
           uint16* __restrict__ out, float* __restrict__ lse, int kv_heads, int max_pages, int kept, int64 page_stride,
           int64 head_stride, int64 token_stride) {
    extern __shared__ __align__(16) float partial[];  // [WARPS][ROWS used][DV], then merged into [0]
    __shared__ float warp_largest[WARPS][ROWS], warp_sum[WARPS][ROWS];
    __shared__ float block_largest[G], block_sum[G];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int head = blockIdx.y / (D / DV), part = blockIdx.y % (D / DV), sequence = blockIdx.z;
    const int blocks = gridDim.x;
    const uint32 rank = cluster_rank();
    let_next_kernel_start();

    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;
    uint32 q[2 * KEY_CHUNKS][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; ++c) {
            const int g = row + 8 * half;
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (g < G) raw = *reinterpret_cast<const uint4*>(query + (first_query + g) * D + 32 * c + 8 * quad);
            q[2 * c][half] = raw.x, q[2 * c][half + 2] = raw.y;
            q[2 * c + 1][half] = raw.z, q[2 * c + 1][half + 2] = raw.w;
        }
    wait_for_previous_kernel();

    const int length = seq_lens[sequence];
    const int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * kept;
    const int* physical = block_table + static_cast<int64>(sequence) * max_pages;
    float largest[2] = {LOWEST, LOWEST}, sum[2] = {0.f, 0.f};
    float output[8 * VALUE_CHUNKS][4];
#pragma unroll
    for (int i = 0; i < 8 * VALUE_CHUNKS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) output[i][j] = 0.f;

    for (int at = warp * blocks + rank; at < kept * TILES; at += WARPS * blocks) {
        const int page = table[at / TILES];
        if (page < 0) break;  // ids are ascending, -1 behind the last
        const int first_token = page * PAGE + at % TILES * 16;
        const int64 base = physical[page] * page_stride + head * head_stride + at % TILES * 16 * token_stride;
        Tile tile;
#pragma unroll
        for (int block = 0; block < 2; ++block)
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c)
                tile.keys[block][c] = *reinterpret_cast<const uint4*>(keys + base + (8 * block + row) * token_stride + 32 * c + 8 * quad);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c)
                tile.values[i][c] = *reinterpret_cast<const uint4*>(
                    values + base + (2 * quad + i % 2 + i / 2 * 8) * token_stride + part * DV + 64 * c + 8 * row);

        float logits[2][4];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
#pragma unroll
            for (int j = 0; j < 4; ++j) logits[block][j] = 0.f;
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) {
                const uint4 k = tile.keys[block][c];
                mma(logits[block], q[2 * c][0], q[2 * c][1], q[2 * c][2], q[2 * c][3], k.x, k.y);
                mma(logits[block], q[2 * c + 1][0], q[2 * c + 1][1], q[2 * c + 1][2], q[2 * c + 1][3], k.z, k.w);
            }
        }
        const int live = length - first_token;  // tokens of this tile that exist
        if (live < 16) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (2 * quad + i % 2 + i / 2 * 8 >= live)
#pragma unroll
                    for (int c = 0; c < VALUE_CHUNKS; ++c) tile.values[i][c] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int block = 0; block < 2; ++block)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                logits[block][j] = 8 * block + 2 * quad + j % 2 < live ? logits[block][j] * (SOFTMAX_SCALE * LOG2_E) : LOWEST;

        uint32 p[2][2];  // [token block][rows 0-7, 8-15]
#pragma unroll
        for (int half = 0; half < (ROWS + 7) / 8; ++half) {
            float next = fmaxf(fmaxf(logits[0][2 * half], logits[0][2 * half + 1]), fmaxf(logits[1][2 * half], logits[1][2 * half + 1]));
            next = fmaxf(largest[half], quad_max(next));
            const float shrink = exp2_fast(largest[half] - next);
            largest[half] = next;
            sum[half] *= shrink;
#pragma unroll
            for (int i = 0; i < 8 * VALUE_CHUNKS; ++i) output[i][2 * half] *= shrink, output[i][2 * half + 1] *= shrink;
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                const float p0 = exp2_fast(logits[block][2 * half] - next), p1 = exp2_fast(logits[block][2 * half + 1] - next);
                p[block][half] = pack(p0, p1);
                // the sum is that of the rounded weights, so that they add to one
                sum[half] += low_of(p[block][half]) + high_of(p[block][half]);
            }
        }
        if (ROWS == 8) p[0][1] = p[1][1] = 0u;
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int pick = i % 2 ? 0x7632 : 0x5410;
                const uint32 b0 = __byte_perm(word_of(tile.values[0][c], i / 2), word_of(tile.values[1][c], i / 2), pick);
                const uint32 b1 = __byte_perm(word_of(tile.values[2][c], i / 2), word_of(tile.values[3][c], i / 2), pick);
                mma(output[8 * c + i], p[0][0], p[0][1], p[1][0], p[1][1], b0, b1);
            }
    }

    // warps -> block
#pragma unroll
    for (int half = 0; half < ROWS / 8; ++half) {
        const int g = row + 8 * half;
        const float total = quad_sum(sum[half]);
        if (quad == 0) warp_largest[warp][g] = largest[half], warp_sum[warp][g] = total;
        if (g < G)
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c)
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int i = 0; i < 8; i += 4)
                        *reinterpret_cast<float4*>(partial + (warp * G + g) * DV + 64 * c + 16 * quad + 8 * j + i) =
                            make_float4(output[8 * c + i][2 * half + j], output[8 * c + i + 1][2 * half + j],
                                        output[8 * c + i + 2][2 * half + j], output[8 * c + i + 3][2 * half + j]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < G * DV; i += THREADS) {
        const int g = i / DV;
        float top = LOWEST, total = 0.f, value = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, warp_largest[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_fast(warp_largest[w][g] - top);
            total += weight * warp_sum[w][g];
            value += weight * partial[w * G * DV + i];
        }
        partial[i] = value;  // warp 0's place, read by this thread alone
        if (i % DV == 0) block_largest[g] = top, block_sum[g] = total;
    }
    // blocks -> output
    cluster_sync();
    for (int i = 2 * (rank * THREADS + threadIdx.x); i < G * DV; i += 2 * blocks * THREADS) {
        const int g = i / DV;
        float top = LOWEST, total = 0.f, value0 = 0.f, value1 = 0.f;
        for (int block = 0; block < blocks; ++block) top = fmaxf(top, load_float_from_block(&block_largest[g], block));
        for (int block = 0; block < blocks; ++block) {
            const float weight = exp2_fast(load_float_from_block(&block_largest[g], block) - top);
            total += weight * load_float_from_block(&block_sum[g], block);
            value0 += weight * load_float_from_block(partial + i, block);
            value1 += weight * load_float_from_block(partial + i + 1, block);
        }
        const float inverse = total > 0.f ? 1.f / total : 0.f;
        reinterpret_cast<uint32*>(out)[((first_query + g) * D + part * DV + i % DV) / 2] = pack(value0 * inverse, value1 * inverse);
        if (part == 0 && i % DV == 0)
            lse[first_query + g] = total > 0.f ? (top + log2_fast(total)) * LN_2 : __int_as_float(0xff800000);
    }
    cluster_sync();  // nobody leaves while others still read its shared memory
}
