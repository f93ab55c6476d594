/*
 * The kernels of each instruction set, and the choice of those of this processor.
 */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__)
#error "needs the vector extensions of GCC or Clang; without this module, the package works with PyTorch alone"
#endif

#define INLINE static inline __attribute__((always_inline))
/* Added to the variances of a normalisation, as in `torch.nn.LayerNorm` */
#define NORM_EPS 1e-5f

enum activation { TANH, RELU, ELU, SILU, GELU, N_ACTIVATIONS };
static const char *const activation_names[] = {"tanh", "relu", "elu", "silu", "gelu"};

struct adam_step {
    float scale, weight_decay, weight1, weight2, beta2, step_size, inverse_root_correction2, eps;
};

struct kernels {
    void (*product)(long, long, long, const float *, long, long, const float *, long, float *, long, const float *, int);
    void (*exp)(const float *, float *, long);
    void (*log)(const float *, float *, long);
    void (*activate)(enum activation, float *, float *, long);
    void (*differentiate)(enum activation, float *, const float *, long);
    void (*add)(float *, const float *, long);
    void (*normalize)(long, long, long, const float *, const float *, const float *, float *, float *, float *);
    void (*denormalize)(long, long, long, const float *, const float *, const float *, const float *, float *);
    void (*add_products)(const float *, const float *, long, long, float *);
    void (*add_rows)(const float *, long, long, long, float *);
    double (*squares)(const float *, long);
    void (*adam)(float *, const float *, float *, float *, long, struct adam_step);
};

#if defined(__x86_64__)
#define X86 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define NAME(function) function##_avx2
#define LANES 8
#define ROWS 6
#define VECTORS 2
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")
#endif
#define NAME(function) function##_avx512
#define LANES 16
#define ROWS 6
#define VECTORS 4
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#define NAME(function) function##_any
#define LANES 4
#if defined(X86)
#define ROWS 4
#define VECTORS 2
#else
#define ROWS 6
#define VECTORS 4
#endif
#include "kernels.h"

static const struct kernels *kernels = &kernels_any;

static const struct {
    const char *name;
    const struct kernels *kernels;
} instruction_sets[] = {
#if defined(X86)
    {"avx512", &kernels_avx512},
    {"avx2", &kernels_avx2},
#endif
    {"any", &kernels_any},
};

static int is_supported(const char *name)
{
#if defined(X86)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw");
    if (!strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !strcmp(name, "any");
}
