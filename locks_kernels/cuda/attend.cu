// Attend: exact softmax attention over the selected pages, split over the CLUSTER blocks of a cluster and merged there.
//
// Bytes: 2 * PAGE * D * 2 per kept page and KV head; at batch 1 it is latency that counts.  A warp takes tiles of 16 tokens: keys
// and values come by 16-byte asynchronous copies into its own ring of STAGES tiles.  Query heads are the 16 rows of the A operand;
// the contraction axes are permuted so that a 16-byte read from shared memory is operands without a shuffle:
//  * keys: lane (row, quad) reads channels 32 c + 8 quad ... + 7 of tokens `row` and `row + 8`: two k-steps each;
//  * values: lane (row, quad) reads channels 64 c + 8 row ... + 7 of tokens 2 quad, + 1, + 8, + 9; one byte-permute packs two
//    tokens of one channel, and the product's column n stands for channel 64 c + 8 n + i.
// Partial results (largest logit, sum, output) meet in shared memory, then each block of the cluster sends every other its slice:
// one cluster barrier to wait at (a first one, that all have started, is over by then), no second launch.
#include "common.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int HALVES = G <= 8 ? 1 : 2;      // of the 16 rows in use
constexpr int DV = D < 128 ? D : 128;       // channels of the output that one block computes
constexpr int KEY_CHUNKS = D / 32, VALUE_CHUNKS = DV / 64;
constexpr int TILES = PAGE / 16;            // tiles of a page
constexpr int KEY_BYTES = 16 * D * 2, TILE_BYTES = KEY_BYTES + 16 * DV * 2;
constexpr int STEP = WARPS * CLUSTER;       // tiles between two of a warp
constexpr int OUTPUTS = G * DV, SLICE = OUTPUTS / CLUSTER;

// Where the 16-byte chunk `chunk` of a token lies in its row of shared memory: no bank is hit twice by the reads above.
__device__ __forceinline__ int swizzled(int token, int chunk) { return chunk ^ (((token >> 1 & 3) << 1) ^ ((token & 1) << 2)); }

__device__ __forceinline__ uint32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

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
};

// Adds the 16 tokens of a tile, of which the first `live` exist.
__device__ __forceinline__ void add_tile(Partial& partial, const uint32 (&q)[2 * KEY_CHUNKS][4], const uint8* tile, int live, int row,
                                         int quad) {
    float logits[2][4];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int j = 0; j < 4; ++j) logits[block][j] = 0.f;
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; ++c) {
            const uint4 k = read_chunk<D>(tile, 8 * block + row, 4 * c + quad);
            mma(logits[block], q[2 * c][0], q[2 * c][1], q[2 * c][2], q[2 * c][3], k.x, k.y);
            mma(logits[block], q[2 * c + 1][0], q[2 * c + 1][1], q[2 * c + 1][2], q[2 * c + 1][3], k.z, k.w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            logits[block][j] = 8 * block + 2 * quad + j % 2 < live ? logits[block][j] * (SOFTMAX_SCALE * LOG2_E) : LOWEST;
    }
    uint32 p[2][2] = {};  // [token block][half]
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float next = fmaxf(fmaxf(logits[0][2 * half], logits[0][2 * half + 1]), fmaxf(logits[1][2 * half], logits[1][2 * half + 1]));
        next = fmaxf(partial.largest[half], quad_max(next));
        const float shrink = exp2_fast(partial.largest[half] - next);
        partial.largest[half] = next;
        partial.sum[half] *= shrink;
#pragma unroll
        for (int i = 0; i < 8 * VALUE_CHUNKS; ++i) partial.output[i][2 * half] *= shrink, partial.output[i][2 * half + 1] *= shrink;
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            p[block][half] = pack(exp2_fast(logits[block][2 * half] - next), exp2_fast(logits[block][2 * half + 1] - next));
            // the sum is that of the rounded weights, so that they add to one
            partial.sum[half] += low_of(p[block][half]) + high_of(p[block][half]);
        }
    }
#pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; ++c) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 2 * quad + i % 2 + i / 2 * 8;
            v[i] = read_chunk<DV>(tile + KEY_BYTES, token, 8 * c + row);
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

// query, out [B, kv_heads * G, D], the query's rows query_stride elements apart; keys, values: pools with strides in elements;
// tables [B, kv_heads, kept] logical pages;
// lse [B, kv_heads * G] natural log, -inf where there is nothing to attend.  grid (CLUSTER, kv_heads * D / DV, B).
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const uint16* __restrict__ query, const uint16* __restrict__ keys, const uint16* __restrict__ values,
           const int* __restrict__ block_table, const int* __restrict__ seq_lens, const int* __restrict__ tables,
           uint16* __restrict__ out, float* __restrict__ lse, int kv_heads, int max_pages, int kept, int64 query_stride,
           int64 page_stride, int64 head_stride, int64 token_stride) {
    extern __shared__ __align__(128) uint8 shared[];  // rings of the warps, afterwards [WARPS][G][DV] partial outputs
    __shared__ float2 warp_weight[WARPS][G];          // largest logit, sum
    __shared__ float received[CLUSTER][SLICE];
    __shared__ float received_largest[CLUSTER][G], received_sum[CLUSTER][G];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int head = blockIdx.y / (D / DV), part = blockIdx.y % (D / DV), sequence = blockIdx.z;
    const uint32 rank = cluster_rank();
    cluster_arrive();  // the others have started, which sending to them needs: waited for below

    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;
    const int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * kept;
    const int* physical = block_table + static_cast<int64>(sequence) * max_pages;
    const int length = seq_lens[sequence];  // like the query it is final: the selection had waited before it let this start

    uint32 q[2 * KEY_CHUNKS][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; ++c) {
            const int g = row + 8 * half;
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (g < G) raw = *reinterpret_cast<const uint4*>(query + sequence * query_stride + (head * G + g) * D + 32 * c + 8 * quad);
            q[2 * c][half] = raw.x, q[2 * c][half + 2] = raw.y;
            q[2 * c + 1][half] = raw.z, q[2 * c + 1][half + 2] = raw.w;
        }
    wait_for_previous_kernel();
    let_next_kernel_start();
    Partial partial;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) partial.largest[half] = LOWEST, partial.sum[half] = 0.f;
#pragma unroll
    for (int i = 0; i < 8 * VALUE_CHUNKS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) partial.output[i][j] = 0.f;

    uint8* ring = shared + warp * STAGES * TILE_BYTES;
    for (int first = warp * CLUSTER + rank; first < kept * TILES; first += 32 * STEP) {
        // lane i looks up this warp's tile i
        const int at = first + lane * STEP;
        const int page = at < kept * TILES ? table[at / TILES] : -1;
        const int64 base = page < 0 ? 0 : physical[page] * page_stride + head * head_stride + at % TILES * 16 * token_stride;
        const int token = page * PAGE + at % TILES * 16;
        const int tiles = __popc(__ballot_sync(ALL_LANES, page >= 0));  // ids are ascending, -1 behind the last
        auto fetch = [&](int tile) {
            if (tile < tiles) {
                const int64 from = __shfl_sync(ALL_LANES, base, tile);
                uint8* to = ring + tile % STAGES * TILE_BYTES;
                copy_rows<D>(to, keys + from, token_stride, lane);
                copy_rows<DV>(to + KEY_BYTES, values + from + part * DV, token_stride, lane);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
#pragma unroll
        for (int tile = 0; tile < STAGES - 1; ++tile) fetch(tile);
        for (int tile = 0; tile < tiles; ++tile) {
            fetch(tile + STAGES - 1);
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            __syncwarp();
            add_tile(partial, q, ring + tile % STAGES * TILE_BYTES, length - __shfl_sync(ALL_LANES, token, tile), row, quad);
            __syncwarp();  // the slot is free again
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // the rings are done with

    float* outputs = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int g = row + 8 * half;
        const float sum = quad_sum(partial.sum[half]);
        if (g < G) {
            if (quad == 0) warp_weight[warp][g] = make_float2(partial.largest[half], sum);
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
    __syncthreads();
    cluster_wait();
#pragma unroll
    for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {  // warps -> block, sent to the block that owns the slice
        const int g = i / DV;
        float largest = LOWEST, sum = 0.f, value = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, warp_weight[w][g].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_fast(warp_weight[w][g].x - largest);
            sum += weight * warp_weight[w][g].y;
            value += weight * outputs[w * OUTPUTS + i];
        }
        store_to_block(&received[rank][i % SLICE], i / SLICE, value);
        if (i % DV < CLUSTER) {
            store_to_block(&received_largest[rank][g], i % DV, largest);
            store_to_block(&received_sum[rank][g], i % DV, sum);
        }
    }
    cluster_sync();
    for (int i = 2 * threadIdx.x; i < SLICE; i += 2 * THREADS) {  // blocks -> output
        const int at = rank * SLICE + i, g = at / DV, channel = at % DV;
        float largest = LOWEST, sum = 0.f, low = 0.f, high = 0.f;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) largest = fmaxf(largest, received_largest[block][g]);
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            const float weight = exp2_fast(received_largest[block][g] - largest);
            sum += weight * received_sum[block][g];
            low += weight * received[block][i], high += weight * received[block][i + 1];
        }
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        reinterpret_cast<uint32*>(out)[((first_query + g) * D + part * DV + channel) / 2] = pack(low * inverse, high * inverse);
        if (part == 0 && channel == 0) lse[first_query + g] = sum > 0.f ? (largest + log2_fast(sum)) * LN_2 : __int_as_float(0xff800000);
    }
}
