/*
 * Arrays of the caller, which are checked, and arrays of this module, whose rows are padded.
 */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(long) >= sizeof(Py_ssize_t), "sizes of arrays are kept in `long`");

/* Round up to a multiple of the widest vector, so that rows can be written in vectors of any instruction set */
static long padded(long n)
{
    return (n + 15) / 16 * 16;
}

/* A matrix of zeros; NULL if there is not enough memory, or none could be that large */
static float *allocate(long rows, long columns)
{
    size_t size;
    void *memory = NULL;
    if (__builtin_mul_overflow((size_t)rows, (size_t)columns, &size) || __builtin_mul_overflow(size, sizeof(float), &size) ||
        posix_memalign(&memory, 64, size))
        return NULL;
    return memset(memory, 0, size);
}

#define SHAPE(...) ((const Py_ssize_t[]){__VA_ARGS__})

/* As Python writes it, with n for a dimension of any size, -1 */
static void write_shape(char *text, size_t size, int ndim, const Py_ssize_t *shape)
{
    PyOS_snprintf(text, size, "%s", ndim < 0 ? "any" : ndim ? "" : "()");
    for (int i = 0; i < ndim; i++) {
        size_t used = strlen(text);
        const char *before = i ? ", " : "(", *after = i < ndim - 1 ? "" : i ? ")" : ",)";
        if (shape[i] < 0)
            PyOS_snprintf(text + used, size - used, "%sn%s", before, after);
        else
            PyOS_snprintf(text + used, size - used, "%s%zd%s", before, shape[i], after);
    }
}

static int fits(const Py_buffer *view, int ndim, const Py_ssize_t *shape)
{
    /* A view may be unaligned, such as one of bytes that was cast. */
    if (!view->format || strcmp(view->format, "f") || view->itemsize != sizeof(float) ||
        (view->len && (uintptr_t)view->buf % sizeof(float)) || (ndim >= 0 && view->ndim != ndim))
        return 0;
    for (int i = 0; i < ndim; i++)
        if (shape[i] >= 0 && view->shape[i] != shape[i])
            return 0;
    return 1;
}

/* Release the view and fail unless it is of float32 and of the shape, which has -1 for a size that is not known. */
static int check_floats(Py_buffer *view, int ndim, const Py_ssize_t *shape, const char *what)
{
    if (fits(view, ndim, shape))
        return 0;
    char expected[128], actual[128];
    write_shape(expected, sizeof(expected), ndim, shape);
    write_shape(actual, sizeof(actual), view->ndim, view->shape);
    PyErr_Format(PyExc_ValueError, "%s must be an aligned array of float32, format f, shape %s, not of format %.50s, shape %s",
                 what, expected, view->format ? view->format : "B", actual);
    PyBuffer_Release(view);
    return -1;
}

/* Get a view of an array. Its object may be one of Python, which runs any code at all, and may call this module. */
static int get_array(PyObject *array, Py_buffer *view, int writable, const char *what)
{
    if (!PyObject_CheckBuffer(array)) {
        PyErr_Format(PyExc_TypeError, "%s must be an array of float32, not %.200s", what, Py_TYPE(array)->tp_name);
        return -1;
    }
    if (PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) < 0) {
        view->obj = NULL; /* so that it can be released */
        if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Format(PyExc_ValueError, "%s must be a C-contiguous%s array of float32", what, writable ? ", writable" : "");
        return -1;
    }
    return 0;
}

static int get_floats(PyObject *array, Py_buffer *view, int ndim, const Py_ssize_t *shape, int writable, const char *what)
{
    return get_array(array, view, writable, what) < 0 ? -1 : check_floats(view, ndim, shape, what);
}

static void transpose_block(const float *source, long lds, long rows, long columns, float *target, long ldt)
{
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int four_of __attribute__((vector_size(16)));
    long i = 0;
    for (; i + 4 <= rows; i += 4) {
        long j = 0;
        for (; j + 4 <= columns; j += 4) {
            const float *from = source + i * lds + j;
            float *to = target + j * ldt + i;
            four a = *(four *)from, b = *(four *)(from + lds), c = *(four *)(from + 2 * lds), d = *(four *)(from + 3 * lds);
#if defined(__clang__)
            four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            four AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            *(four *)to = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            *(four *)(to + ldt) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
            *(four *)(to + 2 * ldt) = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
            *(four *)(to + 3 * ldt) = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
#else
            four_of low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
            four ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
            four AB = __builtin_shuffle(a, b, high), CD = __builtin_shuffle(c, d, high);
            *(four *)to = __builtin_shuffle(ab, cd, first);
            *(four *)(to + ldt) = __builtin_shuffle(ab, cd, second);
            *(four *)(to + 2 * ldt) = __builtin_shuffle(AB, CD, first);
            *(four *)(to + 3 * ldt) = __builtin_shuffle(AB, CD, second);
#endif
        }
        for (; j < columns; j++)
            for (int k = 0; k < 4; k++)
                target[j * ldt + i + k] = source[(i + k) * lds + j];
    }
    for (; i < rows; i++)
        for (long j = 0; j < columns; j++)
            target[j * ldt + i] = source[i * lds + j];
}

/* target (columns x rows, leading dimension ldt) = transpose of source (rows x columns, leading dimension lds) */
static void transpose(const float *source, long lds, long rows, long columns, float *target, long ldt)
{
    /* Blocks that stay in the cache: rows a power of two apart compete for the same places there. */
    const long block = 16;
    for (long i = 0; i < rows; i += block)
        for (long j = 0; j < columns; j += block)
            transpose_block(source + i * lds + j, lds, rows - i < block ? rows - i : block,
                            columns - j < block ? columns - j : block, target + j * ldt + i, ldt);
}

static void copy_rows(const float *source, long lds, float *target, long ldt, long rows, long columns)
{
    if (!rows)
        return; /* There may be no arrays yet. */
    if (lds == columns && ldt == columns) {
        memcpy(target, source, rows * columns * sizeof(float));
        return;
    }
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++)
            target[i * ldt + j] = source[i * lds + j];
}
