// Build: the rank-R spectral summary of complete pages; and append + finalise, the same for the page a new token fills.
//
// The keys are read once from memory (a second time from the first-level cache).  A warp works on UNITS pages of one KV head:
//  1. Gram matrix of the PAGE keys by tensor cores, centred afterwards in fp32 (rows and columns minus their means).
//  2. Its eigenvectors: Cholesky factor with diagonal pivoting, then one-sided Jacobi on the factor's columns, which end as
//     the columns of C = U sqrt(lambda).  The factor is what makes three sweeps enough, whatever the data: on the Gram matrix
//     itself, whose condition is the square, the same rotations need six to eight when the spectrum decays.  Measured on random,
//     low-rank and smooth pages, the added error after three sweeps is below 4e-4 of |D|; quantisation alone is 0.1 to 0.6.
//     A lane holds two columns (or SPLIT lanes a part of their rows each) and rotates them against each other without any
//     exchange; see `sweep` for who meets whom.
//  3. V = D^T U / sqrt(lambda) by tensor cores, with U split in two 16-bit halves.
//  4. Quantised as reference.quantise does, and packed.
#include "common.cuh"

constexpr int PAIRS = PAGE / 2;    // of columns
constexpr int UNITS = 32 / PAIRS;  // pages of a warp when a lane holds whole columns
constexpr int WARPS = PAGE == 64 ? 2 : 4, THREADS = 32 * WARPS;
constexpr int APPEND_WARPS = 2;
constexpr int TILES = PAGE / 16;
constexpr int SWEEPS = 3;

// Of one warp with SLOTS units.
template <int SLOTS>
struct Scratch {
    const uint16* keys[SLOTS];  // of each unit's page, null where there is nothing to do
    uint8* record[SLOTS];
    float gram[SLOTS][PAGE][PAGE + 1];
    float4 column[SLOTS][PAGE / 4];  // row means, then the pivot column
    float vectors[SLOTS][R][PAGE];
    float singular[SLOTS][R], vector_sum[SLOTS][R];
    float mean[D];
};

__device__ __forceinline__ float rsqrt_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float scale_of(float largest, float bound) { return round_bf16(fmaxf(largest / bound, 1e-8f)); }
__device__ __forceinline__ int quantise(float x, float inverse_scale, int lowest, int highest) {
    return min(max(__float2int_rn(x * inverse_scale), lowest), highest);
}
__device__ __forceinline__ uint32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

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

// Where a lane stands when a warp has SLOTS units: lane = (unit * PAIRS + pair) * SPLIT + part.
template <int SLOTS>
struct Place {
    static constexpr int SPLIT = UNITS / SLOTS, ROWS = PAGE / SPLIT;
    const int unit, pair, row;  // `row`: the first of its ROWS rows
    __device__ __forceinline__ Place()
        : unit(threadIdx.x % 32 / (PAIRS * SPLIT)), pair(threadIdx.x / SPLIT % PAIRS), row(threadIdx.x % SPLIT * ROWS) {}
    __device__ __forceinline__ static float over_rows(float x) {
#pragma unroll
        for (int apart = SPLIT / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
        return x;
    }
    __device__ __forceinline__ static float over_pairs(float x) {
#pragma unroll
        for (int apart = PAIRS * SPLIT / 2; apart >= SPLIT; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
        return x;
    }
};

// Two columns of a lane, its rows of them, and the columns' squared norms.
template <int SLOTS>
struct Columns {
    using Where = Place<SLOTS>;
    static constexpr int ROWS = Where::ROWS, SPLIT = Where::SPLIT;
    float w[2][ROWS];
    float norm[2];

    __device__ __forceinline__ void measure() {
        norm[0] = norm[1] = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            norm[0] = fmaf(w[0][i], w[0][i], norm[0]);
            norm[1] = fmaf(w[1][i], w[1][i], norm[1]);
        }
        norm[0] = Where::over_rows(norm[0]), norm[1] = Where::over_rows(norm[1]);
    }
    // Makes the two columns orthogonal: tan(2 theta) = 2 w0.w1 / (|w1|^2 - |w0|^2).
    __device__ __forceinline__ void rotate() {
        float dots[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) dots[i % 4] = fmaf(w[0][i], w[1][i], dots[i % 4]);
        const float dot = Where::over_rows((dots[0] + dots[1]) + (dots[2] + dots[3]));
        const float difference = norm[1] - norm[0], twice = 2.f * dot;
        const float square = fmaf(difference, difference, twice * twice);
        const bool apart = square > 1e-30f;  // the trace is 1: below, both columns are nothing
        const float inverse = apart ? rsqrt_fast(square) : 0.f;
        const float cosine2 = apart ? fmaf(0.5f * fabsf(difference), inverse, 0.5f) : 1.f;
        const float secant = rsqrt_fast(cosine2), cosine = cosine2 * secant;
        const float sine = copysignf(0.5f, difference) * twice * inverse * secant;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float first = w[0][i];
            w[0][i] = fmaf(cosine, first, -sine * w[1][i]);
            w[1][i] = fmaf(sine, first, cosine * w[1][i]);
        }
        const float moved = sine * secant * dot;
        norm[0] -= moved, norm[1] += moved;
    }
    __device__ __forceinline__ void pass_second(int pairs_apart) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) w[1][i] = __shfl_xor_sync(ALL_LANES, w[1][i], pairs_apart * SPLIT);
        norm[1] = __shfl_xor_sync(ALL_LANES, norm[1], pairs_apart * SPLIT);
    }
    // Lanes whose pair has bit `pairs_apart` clear get both first columns of the two lanes, the others both second ones.
    __device__ __forceinline__ void regroup(int pairs_apart) {
        const int apart = pairs_apart * SPLIT;
        const bool upper = threadIdx.x & apart;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) exchange(w[0][i], w[1][i], upper, apart);
        exchange(norm[0], norm[1], upper, apart);
    }
    __device__ __forceinline__ static void exchange(float& first, float& second, bool upper, int apart) {
        const float received = __shfl_xor_sync(ALL_LANES, upper ? first : second, apart);
        first = upper ? received : first;
        second = upper ? second : received;
    }
    // Every pair of columns meets once: within blocks of `size` lanes each first column meets each second one, then the blocks
    // split so that first columns meet among themselves, and second ones.
    __device__ __forceinline__ void sweep() {
        measure();
#pragma unroll 1
        for (int size = PAIRS; size > 0; size /= 2) {
#pragma unroll 1
            for (int m = 0; m < size; ++m) {
                if (m > 0) pass_second(m ^ (m - 1));
                rotate();
            }
            if (size > 1) regroup(size / 2);
        }
    }
};

// Columns 2 pair, 2 pair + 1 of the centred Gram matrix over its trace, and their diagonal entries; returns the trace.
template <int SLOTS>
__device__ __forceinline__ float load_centred(Columns<SLOTS>& columns, float (&diagonal)[2], Scratch<SLOTS>& scratch,
                                              const Place<SLOTS>& at, bool live) {
    constexpr int ROWS = Place<SLOTS>::ROWS;
    float mean[2] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            columns.w[c][i] = live ? scratch.gram[at.unit][at.row + i][2 * at.pair + c] : 0.f;
            mean[c] += columns.w[c][i] * (1.f / PAGE);
        }
    mean[0] = at.over_rows(mean[0]), mean[1] = at.over_rows(mean[1]);
    const float total = at.over_pairs(mean[0] + mean[1]) * (1.f / PAGE);
    float* means = reinterpret_cast<float*>(scratch.column[at.unit]);
    if (at.row == 0) means[2 * at.pair] = mean[0], means[2 * at.pair + 1] = mean[1];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) columns.w[c][i] += total - mean[c] - means[at.row + i];
    __syncwarp();
    // The diagonal comes from shared memory: picking w[c][2 pair + c] would put the columns in local memory.
#pragma unroll
    for (int c = 0; c < 2; ++c)
        diagonal[c] = live ? scratch.gram[at.unit][2 * at.pair + c][2 * at.pair + c] + total - 2.f * mean[c] : 0.f;
    const float trace = at.over_pairs(diagonal[0] + diagonal[1]);
    const float inverse = trace > 0.f ? 1.f / trace : 0.f;
    diagonal[0] *= inverse, diagonal[1] *= inverse;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) columns.w[0][i] *= inverse, columns.w[1][i] *= inverse;
    return trace;
}

// Replaces the columns of a symmetric matrix of trace 1 by those of its Cholesky factor, largest remaining diagonal first.
template <int SLOTS>
__device__ __forceinline__ void factorise(Columns<SLOTS>& columns, float (&diagonal)[2], Scratch<SLOTS>& scratch,
                                          const Place<SLOTS>& at) {
    constexpr int ROWS = Place<SLOTS>::ROWS, SPLIT = Place<SLOTS>::SPLIT;
    float4* shared = scratch.column[at.unit];
    const float4* mine = shared + at.row / 4;
    bool left[2] = {true, true};
#pragma unroll 1
    for (int step = 0; step < PAGE; ++step) {
        // the value's low bits make room for its index; non-negative floats order like integers
        int best = -1;
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (left[c]) best = max(best, (__float_as_int(fmaxf(diagonal[c], 0.f)) & ~(PAGE - 1)) | (2 * at.pair + c));
#pragma unroll
        for (int apart = PAIRS * SPLIT / 2; apart >= SPLIT; apart /= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, apart));
        const int pivot = best & (PAGE - 1);
        const float value = __int_as_float(best & ~(PAGE - 1));
        const float inverse = value > 1e-7f ? rsqrt_fast(value) : 0.f;
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (pivot == 2 * at.pair + c) {
                left[c] = false;
#pragma unroll
                for (int i = 0; i < ROWS; ++i) columns.w[c][i] *= inverse;
#pragma unroll
                for (int i = 0; i < ROWS; i += 4)
                    shared[(at.row + i) / 4] =
                        make_float4(columns.w[c][i], columns.w[c][i + 1], columns.w[c][i + 2], columns.w[c][i + 3]);
            }
        __syncwarp();
        const float2 own = reinterpret_cast<const float2*>(shared)[at.pair];
        const float factor[2] = {left[0] ? own.x : 0.f, left[1] ? own.y : 0.f};
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 l = mine[i / 4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                columns.w[c][i] = fmaf(-factor[c], l.x, columns.w[c][i]);
                columns.w[c][i + 1] = fmaf(-factor[c], l.y, columns.w[c][i + 1]);
                columns.w[c][i + 2] = fmaf(-factor[c], l.z, columns.w[c][i + 2]);
                columns.w[c][i + 3] = fmaf(-factor[c], l.w, columns.w[c][i + 3]);
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) diagonal[c] = fmaf(-factor[c], factor[c], diagonal[c]);
        __syncwarp();
    }
}

// Leaves the R leading eigenvectors of each unit's centred Gram matrix in scratch, largest first.
template <int SLOTS>
__device__ __forceinline__ void eigenvectors(Scratch<SLOTS>& scratch, const Place<SLOTS>& at, bool live) {
    constexpr int ROWS = Place<SLOTS>::ROWS, SPLIT = Place<SLOTS>::SPLIT;
    Columns<SLOTS> columns;
    float diagonal[2];
    const float trace = load_centred(columns, diagonal, scratch, at, live);
    factorise(columns, diagonal, scratch, at);
#pragma unroll 1
    for (int sweep = 0; sweep < SWEEPS; ++sweep) columns.sweep();
    columns.measure();
    int place[2] = {};
#pragma unroll 8
    for (int other = 0; other < PAIRS; ++other) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float norm = __shfl_sync(ALL_LANES, columns.norm[c], other * SPLIT, PAIRS * SPLIT);
#pragma unroll
            for (int own = 0; own < 2; ++own)
                place[own] += norm > columns.norm[own] || (norm == columns.norm[own] && 2 * other + c < 2 * at.pair + own);
        }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float inverse = columns.norm[c] > 1e-12f ? rsqrtf(columns.norm[c]) : 0.f;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            columns.w[c][i] *= inverse;
            sum += columns.w[c][i];
        }
        sum = at.over_rows(sum);
        if (place[c] < R) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) scratch.vectors[at.unit][place[c]][at.row + i] = columns.w[c][i];
            if (at.row == 0) {
                scratch.vector_sum[at.unit][place[c]] = sum;
                scratch.singular[at.unit][place[c]] = inverse > 0.f ? sqrtf(columns.norm[c] * trace) : 0.f;
            }
        }
    }
    __syncwarp();
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
    float basis[D / 64][16], means[D / 64][8], largest_mean = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < D / 64; ++chunk) {
        float c[8][4] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) means[chunk][i] = 0.f;
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
                means[chunk][i] += low_of(b0) + high_of(b0) + low_of(b1) + high_of(b1);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            means[chunk][i] = quad_sum(means[chunk][i]) * (1.f / PAGE);
            largest_mean = fmaxf(largest_mean, fabsf(means[chunk][i]));
            basis[chunk][i] = c[i][0] + c[i][2];
            basis[chunk][8 + i] = c[i][1] + c[i][3];
            if (quad == 0) scratch.mean[64 * chunk + 8 * row + i] = means[chunk][i];
        }
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) largest_mean = fmaxf(largest_mean, __shfl_xor_sync(ALL_LANES, largest_mean, apart));
    const float mean_scale = scale_of(largest_mean, 127.f), inverse_mean_scale = 1.f / mean_scale;
    if (quad == 0) {
#pragma unroll
        for (int chunk = 0; chunk < D / 64; ++chunk) {
            uint32 packed[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                packed[i / 4] |= static_cast<uint32>(quantise(means[chunk][i], inverse_mean_scale, -127, 127) & 0xff) << (8 * (i % 4));
            *reinterpret_cast<uint2*>(record + CENTROID_AT + 64 * chunk + 8 * row) = make_uint2(packed[0], packed[1]);
        }
        if (row == 0) *reinterpret_cast<uint16*>(record + CENTROID_SCALE_AT) = static_cast<uint16>(__float_as_uint(mean_scale) >> 16);
    }
    __syncwarp();
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

// page_ids [count]: physical pages, all complete; summaries [num_pages, kv_heads, RECORD].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    build(const uint16* __restrict__ keys, const int64* __restrict__ page_ids, uint8* __restrict__ summaries, int64 count, int kv_heads,
          int64 page_stride, int64 head_stride, int64 token_stride) {
    __shared__ Scratch<UNITS> shared[WARPS];
    Scratch<UNITS>& scratch = shared[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    wait_for_previous_kernel();  // it may have let this one start before it had written the keys
    const int64 units = count * kv_heads, step = static_cast<int64>(gridDim.x) * WARPS * UNITS;
    for (int64 at = (static_cast<int64>(blockIdx.x) * WARPS + threadIdx.x / 32) * UNITS; at < units; at += step) {
        if (lane < UNITS) {
            const bool live = at + lane < units;
            const int64 page = live ? page_ids[(at + lane) / kv_heads] : 0, head = (at + lane) % kv_heads;
            scratch.keys[lane] = live ? keys + page * page_stride + head * head_stride : nullptr;
            scratch.record[lane] = summaries + (page * kv_heads + head) * RECORD;
        }
        __syncwarp();
        summarise(scratch, token_stride);
    }
}

// Writes each sequence's new token (new_keys, new_values [B, kv_heads, D]) at position seq_lens - 1 and summarises the page that
// it fills.  A warp has one unit, since here latency counts.  The next kernel may start at once: it does not need what this one
// writes, see score.cu; blocks are small so that one of the scorer's fits beside them on an SM.
extern "C" __global__ void __launch_bounds__(32 * APPEND_WARPS, 1)
    append_finalise(uint16* keys, uint16* values, const uint16* __restrict__ new_keys, const uint16* __restrict__ new_values,
                    const int* __restrict__ block_table, const int* __restrict__ seq_lens, uint8* __restrict__ summaries, int batch,
                    int kv_heads, int max_pages, int64 page_stride, int64 head_stride, int64 token_stride) {
    __shared__ Scratch<1> shared[APPEND_WARPS];
    Scratch<1>& scratch = shared[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const int at = blockIdx.x * APPEND_WARPS + threadIdx.x / 32, sequence = at / kv_heads, head = at % kv_heads;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int length = sequence < batch ? seq_lens[sequence] : 0;
    if (length <= 0) return;
    const int64 page = block_table[static_cast<int64>(sequence) * max_pages + (length - 1) / PAGE];
    const int64 base = page * page_stride + head * head_stride, to = base + (length - 1) % PAGE * token_stride;
    for (int c = 8 * lane; c < D; c += 256) {
        *reinterpret_cast<uint4*>(keys + to + c) = *reinterpret_cast<const uint4*>(new_keys + static_cast<int64>(at) * D + c);
        *reinterpret_cast<uint4*>(values + to + c) = *reinterpret_cast<const uint4*>(new_values + static_cast<int64>(at) * D + c);
    }
    if (length % PAGE) return;
    if (lane == 0) scratch.keys[0] = keys + base, scratch.record[0] = summaries + (page * kv_heads + head) * RECORD;
    __syncwarp();
    summarise(scratch, token_stride);
}
