// The thread blocks of a kernel, one after the other on a CPU, with checks of what a GPU leaves
// undefined. Included by the C that translate.py writes, which defines REGISTERS, PARAMETERS and
// SHARED_BYTES before, and `step` behind.
//
// A thread runs alone up to its next synchronization. Of the warps that can go on, a random one does,
// its threads in random order: what depends on the order differs from seed to seed.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { WARP = 32, WARPS = 4, THREADS = WARP * WARPS, LONGEST = 32 };
enum { FINISHED = -1, START = 0 };  // instead of a PTX line
enum { NOBODY = -1, SEVERAL = -2 };  // instead of a thread

typedef enum {
  OUT_OF_BOUNDS, MISALIGNED, INPUT_STORED, OUTPUT_LOADED, STORED_TWICE,
  RACE, NOT_INITIALIZED, DIVERGED, DIVIDED_BY_ZERO, NUM_FAULTS
} Fault;
const int num_faults = NUM_FAULTS;
const char *const names[NUM_FAULTS] = {
  "access out of bounds", "misaligned access", "store to an input", "load from an output",
  "byte stored twice", "race in shared memory", "load of shared memory that nobody has stored to",
  "threads at different synchronizations", "division by zero",
};
uint64_t counts[NUM_FAULTS];
int lines[NUM_FAULTS];  // in the PTX, of the first

static void fault(Fault kind, int line) {
  if (!counts[kind]++) lines[kind] = line;
}

typedef struct {
  int id;             // %tid.x
  uint32_t block[3];  // %ctaid
  int at;             // PTX line of the synchronization where it waits
  bool at_barrier;    // else at a shuffle
  uint32_t barrier;   // its number
  uint32_t value;     // to give in a shuffle, then what is received
  uint32_t peer;      // lane to receive from
  REGISTERS
} Thread;

static void step(Thread *t);
static Thread threads[THREADS];

static uint32_t state;
static uint32_t random_below(uint32_t limit) {
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state % limit;
}

static float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static uint64_t get(const uint8_t *data, int bytes) { uint64_t x = 0; memcpy(&x, data, bytes); return x; }
static void put(uint8_t *data, uint64_t x, int bytes) { memcpy(data, &x, bytes); }

static uint16_t to_bfloat16(float x) {  // to the nearest, ties to even
  uint32_t bits = as_bits(x);
  return isnan(x) ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static uint16_t to_float16(float x) {
  _Float16 half = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return isnan(x) ? 0x7fff : bits;
}
static float from_float16(uint16_t bits) { _Float16 half; memcpy(&half, &bits, 2); return half; }
static float low(uint64_t pair) { return as_float((uint32_t)pair); }
static float high(uint64_t pair) { return as_float(pair >> 32); }
static uint64_t pair(float low, float high) { return (uint64_t)as_bits(high) << 32 | as_bits(low); }
static uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {  // the bytes of b and a
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t selector = selectors >> 4 * i & 15, byte = bytes >> 8 * (selector & 7) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;  // its sign
    out |= byte << 8 * i;
  }
  return out;
}
static float min_or_nan(float a, float b) { return isnan(a) || isnan(b) ? NAN : a < b ? a : b; }
static float max_or_nan(float a, float b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }
static int64_t divide(int64_t a, int64_t b, int line) {
  if (!b) fault(DIVIDED_BY_ZERO, line);
  return b ? a / b : 0;
}

// Global memory. Every buffer has addresses far from the others' and aligned to no more than 256,
// which is all that a kernel may count on.

static uint8_t *buffers[PARAMETERS], *stored[PARAMETERS];  // stored: by byte; NULL for an input
static uint64_t sizes[PARAMETERS];
enum { ALIGNMENT = 256, REGION = 40 };  // bits of addresses that are a buffer's own
static uint64_t address_of(uint64_t i) { return ((i + 1) << REGION) + ALIGNMENT; }

// The buffer that the access is in, or -1.
static int buffer_at(uint64_t address, uint64_t bytes, int line) {
  uint64_t i = (address >> REGION) - 1, offset = address - address_of(i);
  if (i >= PARAMETERS || offset > sizes[i] || bytes > sizes[i] - offset) {
    fault(OUT_OF_BOUNDS, line);
    return -1;
  }
  if (address % bytes) fault(MISALIGNED, line);
  return i;
}

static void load_global(Thread *t, uint64_t address, uint8_t *data, int bytes, int line) {
  int i = buffer_at(address, bytes, line);
  memset(data, 0xA5, bytes);
  if (i < 0) return;
  if (stored[i]) fault(OUTPUT_LOADED, line);
  memcpy(data, buffers[i] + (address - address_of(i)), bytes);
}

static void store_global(Thread *t, uint64_t address, const uint8_t *data, int bytes, int line) {
  int i = buffer_at(address, bytes, line);
  if (i < 0) return;
  if (!stored[i]) { fault(INPUT_STORED, line); return; }
  uint64_t offset = address - address_of(i);
  for (int k = 0; k < bytes; k++)
    if (stored[i][offset + k]++) { fault(STORED_TWICE, line); stored[i][offset + k] = 1; }
  memcpy(buffers[i] + offset, data, bytes);
}

// Shared memory. Two threads race for a byte if one of them stores and no barrier of the block is
// between. The lanes of a warp may store the same value.

static uint8_t shared[SHARED_BYTES + 1];
static struct { int writer, reader; bool initialized; } traces[SHARED_BYTES + 1];

static bool is_shared(uint64_t address, uint64_t bytes, int line) {
  bool inside = address <= SHARED_BYTES && bytes <= SHARED_BYTES - address;
  if (!inside) fault(OUT_OF_BOUNDS, line);
  if (address % bytes) fault(MISALIGNED, line);
  return inside;
}

static void load_shared(Thread *t, uint64_t address, uint8_t *data, int bytes, int line) {
  memset(data, 0xA5, bytes);
  if (!is_shared(address, bytes, line)) return;
  for (uint64_t k = address; k < address + bytes; k++) {
    if (!traces[k].initialized) fault(NOT_INITIALIZED, line);
    if (traces[k].writer != NOBODY && traces[k].writer != t->id) fault(RACE, line);
    bool other = traces[k].reader != NOBODY && traces[k].reader != t->id;
    traces[k].reader = other ? SEVERAL : t->id;
  }
  memcpy(data, shared + address, bytes);
}

static void store_shared(Thread *t, uint64_t address, const uint8_t *data, int bytes, int line) {
  if (!is_shared(address, bytes, line)) return;
  for (int k = 0; k < bytes; k++) {
    int writer = traces[address + k].writer, reader = traces[address + k].reader;
    bool same = writer / WARP == t->id / WARP && shared[address + k] == data[k];
    if (writer != NOBODY && writer != t->id && !same) fault(RACE, line);
    if (reader != NOBODY && reader != t->id) fault(RACE, line);
    traces[address + k].writer = t->id;
    traces[address + k].initialized = true;
  }
  memcpy(shared + address, data, bytes);
}

static void forget_accesses(void) {
  for (int k = 0; k < SHARED_BYTES; k++) traces[k].writer = traces[k].reader = NOBODY;
}

static void shuffle(int *order, int count) {
  for (int i = 0; i < count; i++) {
    int j = random_below(i + 1);
    order[i] = order[j];
    order[j] = i;
  }
}

// Whether threads `first` up to `last` wait at the same place.
static bool together(int first, int last) {
  for (int i = first; i < last; i++)
    if (threads[i].at != threads[first].at || threads[i].barrier != threads[first].barrier)
      return false;
  return true;
}

// Run a warp up to its next synchronization; false if its threads are at different ones.
static bool run_warp(Thread *warp) {
  int order[WARP];
  uint32_t values[WARP];
  shuffle(order, WARP);
  for (int i = 0; i < WARP; i++) step(&warp[order[i]]);
  if (!together(warp->id, warp->id + WARP)) {
    fault(DIVERGED, warp->at);
    return false;
  }
  for (int i = 0; i < WARP; i++) values[i] = warp[i].value;
  if (!warp->at_barrier)
    for (int i = 0; i < WARP; i++) warp[i].value = values[warp[i].peer % WARP];
  return true;
}

static void run_block(uint32_t x, uint32_t y, uint32_t z) {
  memset(threads, 0xA5, sizeof threads);  // registers too
  for (int i = 0; i < THREADS; i++) {
    threads[i].id = i, threads[i].at = START, threads[i].barrier = 0;
    threads[i].at_barrier = false;
    threads[i].block[0] = x, threads[i].block[1] = y, threads[i].block[2] = z;
  }
  memset(shared, 0xA5, sizeof shared);
  memset(traces, 0, sizeof traces);
  forget_accesses();
  for (;;) {
    int ready[WARPS], count = 0;
    for (int w = 0; w < WARPS; w++) {
      Thread *warp = &threads[w * WARP];
      if (warp->at != FINISHED && !warp->at_barrier) ready[count++] = w;
    }
    if (count) {
      if (!run_warp(&threads[ready[random_below(count)] * WARP])) return;
    } else if (!together(0, THREADS)) {
      fault(DIVERGED, threads[0].at);
      return;
    } else if (threads[0].at == FINISHED) {
      return;
    } else {
      for (int i = 0; i < THREADS; i++) threads[i].at_barrier = false;
      forget_accesses();
    }
  }
}

void run(uint8_t **memory, uint8_t **marks, const uint64_t *bytes, const uint32_t *grid, uint32_t seed) {
  state = seed * 2654435761u + 1;
  memset(counts, 0, sizeof counts);
  memcpy(buffers, memory, sizeof buffers);
  memcpy(stored, marks, sizeof stored);
  memcpy(sizes, bytes, sizeof sizes);
  for (uint32_t z = 0; z < grid[2]; z++)
    for (uint32_t y = 0; y < grid[1]; y++)
      for (uint32_t x = 0; x < grid[0]; x++) run_block(x, y, z);
}
