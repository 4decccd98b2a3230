// The leading eigenvectors of the centred Gram matrices of a few pages, one warp for all of them.
//
// Cholesky factor with diagonal pivoting, then one-sided Jacobi on the factor's columns, which end as the columns of
// C = U sqrt(lambda).  The factor is what makes three sweeps enough, whatever the data: on the Gram matrix itself, whose condition
// is the square, the same rotations need six to eight when the spectrum decays.  Measured on random, low-rank and smooth pages,
// the added error after three sweeps is below 4e-4 of |D|; rank 8 and int4 together cost 0.1 to 0.6.  A lane holds two columns (or SPLIT
// lanes a part of their rows each) and rotates them against each other without any exchange; see `sweep` for who meets whom.
#pragma once
#include "record.cuh"

constexpr int PAIRS = PAGE / 2;    // of columns
constexpr int UNITS = 32 / PAIRS;  // pages of a warp when a lane holds whole columns
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
