/* Measure what one core multiplies and adds per second at most, from registers alone.

       gcc -O2 benchmarks/core_peak.c -o core_peak && ./core_peak

   The yardstick for the time of a convolution on a CPU: a library's own product is slower. Counts
   processor seconds, so that it holds on a shared machine. A precision that the processor has no
   instruction for is left out; tile instructions (AMX) are not measured. */

#include <immintrin.h>
#include <stdio.h>
#include <time.h>

#ifndef ROUNDS
#define ROUNDS 20000000L
#endif
#define CHAINS 12 /* sums at once: more than are added during an instruction's latency */

/* Define `name`, which returns 1e9 operations per second of `step`, `operations` each. */
#define MEASURE(name, isa, type, zero, one, step, operations)                  \
  __attribute__((target(isa))) static double name(void) {                      \
    type sums[CHAINS], x = one;                                                \
    for (int i = 0; i < CHAINS; i++) sums[i] = zero;                           \
    clock_t start = clock();                                                   \
    for (long round = 0; round < ROUNDS; round++) {                            \
      _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++)                \
        sums[i] = step(sums[i], x);                                            \
      __asm__ volatile("" : "+v"(x)); /* or the compiler might skip rounds */  \
    }                                                                          \
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;               \
    for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : : "v"(sums[i]));    \
    return 1e-9 * ROUNDS * CHAINS * operations / seconds;                      \
  }

#define FMA256(sum, x) _mm256_fmadd_ps(x, x, sum)
#define FMA512(sum, x) _mm512_fmadd_ps(x, x, sum)
#define DOT_BF16(sum, x) _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x)
#define DOT_INT8(sum, x) _mm512_dpbusd_epi32(sum, x, x)
#define ONE _mm512_set1_ps(1)

MEASURE(fma256, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_set1_ps(1), FMA256, 16)
MEASURE(fma512, "avx512f", __m512, _mm512_setzero_ps(), ONE, FMA512, 32)
MEASURE(bf16, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(), ONE, DOT_BF16, 64)
MEASURE(int8, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(), _mm512_set1_epi8(1), DOT_INT8,
        128)

int main(void) {
  if (__builtin_cpu_supports("fma"))
    printf("float32, 256 bits (vfmadd): %.0f GFLOP/s\n", fma256());
  if (__builtin_cpu_supports("avx512f"))
    printf("float32, 512 bits (vfmadd): %.0f GFLOP/s\n", fma512());
  if (__builtin_cpu_supports("avx512bf16"))
    printf("bfloat16 (vdpbf16ps): %.0f GFLOP/s\n", bf16());
  if (__builtin_cpu_supports("avx512vnni"))
    printf("int8 (vpdpbusd): %.0f GOP/s\n", int8());
  return 0;
}
