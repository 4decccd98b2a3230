// Projection: a weight matrix times one vector at the read roof, with the small work around it: RMS norm before; bias, residual,
// SiLU * up, or rotary embedding and append after.
//
// Every weight is read once.  A block owns some rows of the result; SPLIT of its warps share a row, so that each keeps its part of
// the vector in registers.  Each warp fills its own ring by bulk copies, and the first ring is asked for before the kernel ahead
// has ended, since weights do not depend on it: the memory never waits for a launch.  Measured on an H200: copies of 1 KB reach
// no more than 2.9 TB/s, whatever is in flight, so a warp's part of a row is long rather than short.
#include "bulk.cuh"

// Set by the launcher: IN columns, NORM, EPILOGUE, EPSILON, SPLIT, CHUNK (16-byte loads that one copy brings), RING_BYTES.
constexpr int BIAS = 1, ADD = 2, SILU_MUL = 3, QKV = 4, QKV_BIAS = 5;
constexpr int WARPS = 8, THREADS = 32 * WARPS, GROUPS = WARPS / SPLIT;
constexpr int PIECE = IN / SPLIT, VECTORS = PIECE / 8;  // columns of a warp, in 16-byte loads
constexpr int CHUNKS = (VECTORS + CHUNK - 1) / CHUNK;
constexpr int LOADS = (VECTORS + 31) / 32;  // of a lane
constexpr int SLOTS = RING_BYTES / (WARPS * CHUNK * 16);
constexpr bool WIDE = LOADS <= 10;                  // the vector as fp32, where there are registers for it
constexpr int ROWS = EPILOGUE >= SILU_MUL ? 2 : 1;  // of the matrix for one unit of the result
constexpr int MOST_ROWS = 256;                      // of a block
static_assert(IN % (8 * SPLIT) == 0 && CHUNK % 32 == 0 && SLOTS >= 2 && SLOTS <= 32);

__device__ __forceinline__ void widen(float (&to)[8], const uint4& from) {
    const uint32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[2 * i] = low_of(words[i]), to[2 * i + 1] = high_of(words[i]);
}
__device__ __forceinline__ uint4 narrow(const float (&from)[8]) {
    return make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7]));
}

struct Vector {  // of a lane: loads 32 i + lane of its warp's piece
    uint4 packed[WIDE ? 1 : LOADS];
    float wide[WIDE ? LOADS : 1][8];

    __device__ __forceinline__ void set(int i, const uint4& value) {
        if constexpr (WIDE) widen(wide[i], value);
        else packed[i] = value;
    }
    __device__ __forceinline__ void get(float (&to)[8], int i) const {
        if constexpr (WIDE) {
#pragma unroll
            for (int k = 0; k < 8; ++k) to[k] = wide[i][k];
        } else {
            widen(to, packed[i]);
        }
    }
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
    return x;
}
__device__ __forceinline__ uint4 load(const uint16* from, int at) {
    return at < VECTORS ? reinterpret_cast<const uint4*>(from)[at] : make_uint4(0, 0, 0, 0);
}

// x, or its RMS norm times gain rounded to the stored type as layer_ops does; the whole block calls.
__device__ __forceinline__ void load_vector(Vector& vector, const uint16* x, const uint16* gain, int warp, int lane) {
    __shared__ float squares[WARPS];
    x += warp % SPLIT * PIECE, gain += warp % SPLIT * PIECE;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const uint4 raw = load(x, 32 * i + lane);
        vector.set(i, raw);
        float value[8];
        widen(value, raw);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += value[k] * value[k];
    }
    if constexpr (NORM) {
        sum = sum_of_lanes(sum);
        if (lane == 0) squares[warp] = sum;
        __syncthreads();
        sum = 0.f;
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) sum += squares[warp / SPLIT * SPLIT + i];
        const float scale = rsqrtf(sum / IN + EPSILON);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            float value[8], gains[8];
            vector.get(value, i);
            widen(gains, load(gain, 32 * i + lane));
#pragma unroll
            for (int k = 0; k < 8; ++k) value[k] = value[k] * scale * gains[k];
            vector.set(i, narrow(value));
        }
    }
}

// The rows of the matrix that make unit `unit` of the result; D only matters to QKV, whose channels d and d + D/2 rotate together.
__device__ __forceinline__ int64 row_of(int unit, int part, int units) {
    if (EPILOGUE == SILU_MUL) return unit + static_cast<int64>(part) * units;
    if (EPILOGUE >= QKV) return unit / (D / 2) * D + unit % (D / 2) + part * (D / 2);
    return unit;
}

// Products of the block's rows with the vector, in results [ROWS * count] behind a __syncthreads.
__device__ __forceinline__ void multiply(float (&results)[MOST_ROWS], const uint16* x, const uint16* gain,
                                         const uint16* __restrict__ weight, int first, int count, int units) {
    extern __shared__ __align__(128) uint8 rings[];
    __shared__ __align__(8) uint64 full[WARPS][SLOTS];
    __shared__ float sums[MOST_ROWS][SPLIT];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / SPLIT, part = warp % SPLIT;
    if (threadIdx.x == 0) {
        for (int i = 0; i < WARPS * SLOTS; ++i) barrier_init(shared_address(&full[0][0] + i), 1);
        barriers_ready();
    }
    __syncthreads();
    let_next_kernel_start();

    const uint64 policy = read_once_policy();
    const int rows = max(ROWS * count - group + GROUPS - 1, 0) / GROUPS;  // of this warp: group, group + GROUPS, ...
    const uint32 ring = shared_address(rings) + warp * SLOTS * CHUNK * 16;
    const auto fetch = [&](int at, int slot) {
        const int row = at / CHUNKS * GROUPS + group, chunk = at % CHUNKS;
        const uint32 bytes = 16 * (chunk == CHUNKS - 1 ? VECTORS - CHUNK * (CHUNKS - 1) : CHUNK);
        const uint16* from = weight + row_of(first + row / ROWS, row % ROWS, units) * IN + part * PIECE + chunk * CHUNK * 8;
        barrier_expect(shared_address(&full[warp][slot]), bytes);
        copy_bulk(ring + slot * CHUNK * 16, from, bytes, shared_address(&full[warp][slot]), policy);
    };
    if (lane < SLOTS && lane < rows * CHUNKS) fetch(lane, lane);

    wait_for_previous_kernel();
    Vector vector;
    load_vector(vector, x, gain, warp, lane);
    int slot = 0, parity = 0;
    for (int row = 0, at = 0; row < rows; ++row) {
        float sum[4] = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk, ++at) {
            barrier_wait(shared_address(&full[warp][slot]), parity);
            const uint4* loads = reinterpret_cast<const uint4*>(rings + (warp * SLOTS + slot) * CHUNK * 16);
#pragma unroll
            for (int j = 0; j < CHUNK / 32; ++j) {
                const int i = CHUNK / 32 * chunk + j;
                if (i >= LOADS) break;
                float w[8], v[8];
                widen(w, 32 * i + lane < VECTORS ? loads[32 * j + lane] : make_uint4(0, 0, 0, 0));
                vector.get(v, i);
#pragma unroll
                for (int k = 0; k < 8; ++k) sum[k % 4] = fmaf(w[k], v[k], sum[k % 4]);
            }
            __syncwarp();
            if (lane == 0 && at + SLOTS < rows * CHUNKS) fetch(at + SLOTS, slot);
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
        const float whole = sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
        if (lane == 0) sums[row * GROUPS + group][part] = whole;
    }
    __syncthreads();
    for (int row = threadIdx.x; row < ROWS * count; row += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) sum += sums[row][i];
        results[row] = sum;
    }
    __syncthreads();
}

__device__ __forceinline__ float value_of(const uint16* from) { return low_of(*from); }
__device__ __forceinline__ void store_value(uint16* to, float value) { *to = static_cast<uint16>(pack(value, 0.f)); }

#if EPILOGUE < 4
// out [units] = weight [ROWS * units, IN] x [IN], by EPILOGUE: 0 as it is; BIAS: plus bias; ADD: added to what `out` holds; SILU_MUL:
// silu of the first half of the rows times the second half.  NORM: x is RMS-normed with gain [IN] first.
extern "C" __global__ void __launch_bounds__(THREADS)
    gemv(const uint16* x, const uint16* gain, const uint16* __restrict__ weight, const uint16* bias, uint16* out, int units,
         int units_per_block) {
    __shared__ float results[MOST_ROWS];
    const int first = blockIdx.x * units_per_block, count = min(units_per_block, units - first);
    multiply(results, x, gain, weight, first, count, units);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float value = results[ROWS * i];
        if (EPILOGUE == BIAS) value += value_of(bias + first + i);
        if (EPILOGUE == ADD) value += value_of(out + first + i);
        if (EPILOGUE == SILU_MUL) value = value / (1.f + exp2_fast(-value * LOG2_E)) * results[ROWS * i + 1];
        store_value(out + first + i, value);
    }
}
#else
// Query, key and value of the new token: weight [(HQ + 2 H) D, IN]; table fp32 [D], cosines, then sines; queries [HQ, D], keys and
// values [H, D].  `appends`: key and value also go to position seq_lens - 1 of the cache, whose strides are in elements.
extern "C" __global__ void __launch_bounds__(THREADS)
    qkv(const uint16* x, const uint16* gain, const uint16* __restrict__ weight, const uint16* bias, const float* table, uint16* queries,
        uint16* keys, uint16* values, uint16* cache_keys, uint16* cache_values, const int* block_table, const int* seq_lens, int units,
        int units_per_block, int query_heads, int kv_heads, int appends, int page_size, int64 page_stride, int64 head_stride,
        int64 token_stride) {
    __shared__ float results[MOST_ROWS];
    const int first = blockIdx.x * units_per_block, count = min(units_per_block, units - first);
    multiply(results, x, gain, weight, first, count, units);
    const int position = appends ? seq_lens[0] - 1 : -1;
    const int64 slot = position < 0 ? 0 : block_table[position / page_size] * page_stride + position % page_size * token_stride;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int head = (first + i) / (D / 2), d = (first + i) % (D / 2);
        float low = results[2 * i], high = results[2 * i + 1];
        if (EPILOGUE == QKV_BIAS) low += value_of(bias + head * D + d), high += value_of(bias + head * D + D / 2 + d);
        if (head < query_heads + kv_heads) {
            const float cosine = table[d], sine = table[D / 2 + d], rotated = low * cosine - high * sine;
            high = high * cosine + low * sine;
            low = rotated;
        }
        const int kv_head = head - query_heads - (head < query_heads + kv_heads ? 0 : kv_heads);
        const bool is_key = head < query_heads + kv_heads;
        uint16* to = head < query_heads ? queries + head * D : (is_key ? keys : values) + kv_head * D;
        store_value(to + d, low), store_value(to + D / 2 + d, high);
        if (head >= query_heads && position >= 0) {
            to = (is_key ? cache_keys : cache_values) + slot + kv_head * head_stride;
            store_value(to + d, low), store_value(to + D / 2 + d, high);
        }
    }
}
#endif
