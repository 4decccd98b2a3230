// Shared device code: 16-bit floats, tensor-core instructions, early launch, clusters.  Written for NVRTC without any header.
//
// Compile-time parameters of every kernel (macros): D head width, PAGE tokens per page, R rank, G query heads per KV head,
// FP16 1 for float16 caches and 0 for bfloat16, SOFTMAX_SCALE 1/sqrt(D).  Lane naming used throughout: `row` = lane / 4,
// `quad` = lane % 4, the two coordinates that the fragments of mma.sync have in common.
#pragma once

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

constexpr uint32 ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float LOWEST = -1e30f;  // stands for -inf where a difference of two of them must not be NaN

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------------
__device__ __forceinline__ float bf16_low(uint32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float round_bf16(float x) { return bf16_low(pack_bf16(x, 0.f)); }

__device__ __forceinline__ float f16_low(uint32 pair) {
    float y;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(pair));
    return y;
}
__device__ __forceinline__ float f16_high(uint32 pair) {
    float y;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(pair));
    return y;
}
__device__ __forceinline__ uint32 pack_f16(float low, float high) {
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The cache's own type.
__device__ __forceinline__ float low_of(uint32 pair) { return FP16 ? f16_low(pair) : bf16_low(pair); }
__device__ __forceinline__ float high_of(uint32 pair) { return FP16 ? f16_high(pair) : bf16_high(pair); }
__device__ __forceinline__ uint32 pack(float low, float high) { return FP16 ? pack_f16(low, high) : pack_bf16(low, high); }

// ---- tensor cores --------------------------------------------------------------------------------------------------
// c[16 x 8] += a[16 x 32] b[32 x 8], int8 in, int32 out
__device__ __forceinline__ void mma_s8(int (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c[16 x 8] += a[16 x 16] b[16 x 8], half in, fp32 out
__device__ __forceinline__ void mma_f16(float (&c)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c[16 x 8] += a[16 x 8] b[8 x 8], half in, fp32 out
__device__ __forceinline__ void mma_f16_k8(float (&c)[4], uint32 a0, uint32 a1, uint32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
// c[16 x 8] += a[16 x 16] b[16 x 8] in the cache's own type
__device__ __forceinline__ void mma(float (&c)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
#if FP16
    mma_f16(c, a0, a1, a2, a3, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

__device__ __forceinline__ uint32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// ---- warps ---------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32 warp_sum(uint32 x) { return __reduce_add_sync(ALL_LANES, x); }
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// ---- programmatic dependent launch: a kernel may start before the one ahead of it in the stream has ended --------------
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- clusters: CLUSTER blocks (a macro of the kernels that use it), one block where the architecture has none ----------
__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}
#ifdef CLUSTER
__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank = 0;
#if __CUDA_ARCH__ >= 900
    if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// BLOCKS here and below: CLUSTER, or 1 where a block of a cluster works for itself.
template <int BLOCKS = CLUSTER>
__device__ __forceinline__ void cluster_sync() {
    if (BLOCKS > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
}
// The word that block `rank` of the cluster has at the place where this block has `local`.
template <int BLOCKS = CLUSTER>
__device__ __forceinline__ uint32 load_from_block(const uint32* local, uint32 rank) {
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        uint32 remote, value;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(rank));
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
        return value;
    }
#endif
    return *local;
}
// Writes to the place of block `rank` that corresponds to `local`.
template <int BLOCKS = CLUSTER>
__device__ __forceinline__ void store_to_block(uint32* local, uint32 rank, uint32 value) {
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        uint32 remote;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(rank));
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
        return;
    }
#endif
    *local = value;
}
__device__ __forceinline__ void store_to_block(float* local, uint32 rank, float value) {
    store_to_block(reinterpret_cast<uint32*>(local), rank, __float_as_uint(value));
}
#endif
