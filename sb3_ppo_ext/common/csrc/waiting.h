/* What processes need that wait for each other in shared memory, on POSIX. */
#ifndef SB3_PPO_EXT_WAITING_H
#define SB3_PPO_EXT_WAITING_H

#include <time.h>

/* A hint to the processor that this is a loop that waits. */
static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Seconds on a clock that is never set back */
static inline double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

#endif
