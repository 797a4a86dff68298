// How fast memory is read: bandwidth BYTES THREADS ROUNDS prints bytes a second of each round, as a JSON list.
// Each thread reads its part over and over; huge pages where the system gives them, as the kernels of rackserve ask for them.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t Wide __attribute__((vector_size(64)));
enum { kLanes = 8, kAhead = 16384 };

struct Part {
    const Wide *from;
    size_t count;
    int passes;
    Wide sum;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *read_part(void *given) {
    struct Part *part = given;
    Wide sum[kLanes];
    memset(sum, 0, sizeof sum);
    for (int pass = 0; pass < part->passes; ++pass)
        for (size_t at = 0; at + kLanes <= part->count; at += kLanes)
            for (int lane = 0; lane < kLanes; ++lane) {
                __builtin_prefetch((const char *)&part->from[at + lane] + kAhead);
                sum[lane] ^= part->from[at + lane];
            }
    for (int lane = 0; lane < kLanes; ++lane) part->sum ^= sum[lane];
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const size_t huge = 2u << 20, bytes = (strtoull(argv[1], NULL, 10) + huge - 1) / huge * huge;
    const int threads = atoi(argv[2]), rounds = atoi(argv[3]);
    char *memory = aligned_alloc(huge, bytes);
    if (!memory || threads < 1 || threads > 64) return 1;
    madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 1, bytes);
    const int passes = (int)((1ull << 31) / bytes) + 1;
    printf("[");
    for (int round = 0; round <= rounds; ++round) {  // the first one warms up
        struct Part part[64];
        pthread_t thread[64];
        const size_t each = bytes / sizeof(Wide) / (size_t)threads;
        const double start = now();
        for (int at = 0; at < threads; ++at) {
            part[at] = (struct Part){(const Wide *)memory + each * (size_t)at, each, passes, {0}};
            if (pthread_create(&thread[at], NULL, read_part, &part[at])) return 1;
        }
        for (int at = 0; at < threads; ++at) pthread_join(thread[at], NULL);
        if (round) printf("%s%.6g", round > 1 ? ", " : "", (double)bytes * passes / (now() - start));
    }
    printf("]\n");
    return 0;
}
