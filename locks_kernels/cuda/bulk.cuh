// Barriers in shared memory, and the bulk copies from global memory (sm_90 and newer) that complete on them.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void barrier_init(uint32 barrier, uint32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
#else
    asm volatile(
        "{.reg .pred p; .reg .b64 s;\n"
        "again: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
        "@!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
#endif
}

// For what is read once: it leaves the second-level cache first, so that what others share stays.
__device__ __forceinline__ uint64 read_once_policy() {
    uint64 policy = 0;
#if __CUDA_ARCH__ >= 900
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// Whoever has called barrier_init, before the others of the block or warp are waited for.
__device__ __forceinline__ void barriers_ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
// Arrives, and lets the barrier wait for `bytes` to be copied.
__device__ __forceinline__ void barrier_expect(uint32 barrier, uint32 bytes) {
    asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;}" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void prefetch_bulk(const void* from, uint32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32 to, const void* from, uint32 bytes, uint32 barrier, uint64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
#endif
