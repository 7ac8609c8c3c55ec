/* Print the billions of operations per processor second (a multiply-add is two) that one thread
   reaches with data in registers, for each precision that this processor has instructions for.

   Twelve registers take a sum each, which hides the latency of the arithmetic units. */
#include <stdio.h>
#include <time.h>

#define ROUNDS 20000000L

/* `instruction` adds products of register 15 with itself to each of the registers 0 to 11. */
#define TWELVE(instruction, kind)                                                            \
  ADD(instruction, kind, 0) ADD(instruction, kind, 1) ADD(instruction, kind, 2)              \
  ADD(instruction, kind, 3) ADD(instruction, kind, 4) ADD(instruction, kind, 5)              \
  ADD(instruction, kind, 6) ADD(instruction, kind, 7) ADD(instruction, kind, 8)              \
  ADD(instruction, kind, 9) ADD(instruction, kind, 10) ADD(instruction, kind, 11)
#define ADD(instruction, kind, sum) instruction " %%" kind "15, %%" kind "15, %%" kind #sum "\n\t"
#define SUMS                                                                                 \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",   \
      "xmm11", "xmm15"
#define MEASURE(name, instruction, kind, operations)                                         \
  do {                                                                                       \
    __asm__ volatile("vzeroall" ::: SUMS);                                                   \
    double started = processor_seconds();                                                    \
    for (long round = 0; round < ROUNDS; round++)                                            \
      __asm__ volatile(TWELVE(instruction, kind) ::: SUMS);                                  \
    printf("%s %.1f\n", name,                                                                \
           12e-9 * operations * ROUNDS / (processor_seconds() - started));                   \
  } while (0)

static double processor_seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

int main(void) {
#if defined(__AVX512F__)
  MEASURE("float32", "vfmadd231ps", "zmm", 32);
#elif defined(__FMA__)
  MEASURE("float32", "vfmadd231ps", "ymm", 16);
#endif
#if defined(__AVX512BF16__)
  MEASURE("bfloat16", "vdpbf16ps", "zmm", 64);
#endif
#if defined(__AVX512VNNI__)
  MEASURE("int8", "vpdpbusd", "zmm", 128);
#endif
  return 0;
}
