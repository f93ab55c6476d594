/*
 * Normalisation of advantages.
 */

#pragma once

#include "arrays.h"

/* Sample variance, with a divisor of n - 1. A single advantage is left unchanged. */
static void normalize_part(const float *from, float *to, long n)
{
    double sum = 0, squares = 0;
    for (long i = 0; i < n; i++)
        sum += from[i];
    double mean = sum / n;
    for (long i = 0; i < n; i++)
        squares += (from[i] - mean) * (from[i] - mean);
    double scale = 1 / (sqrt(squares / (n > 1 ? n - 1 : 1)) + 1e-8);
    for (long i = 0; i < n; i++)
        to[i] = n > 1 ? (float)((from[i] - mean) * scale) : from[i];
}

PyDoc_STRVAR(normalize_doc, "normalize(advantages, size, out)\n\nWrite advantages that are normalised in each minibatch of so "
                            "many samples; the last one may be smaller.");
static PyObject *normalize(PyObject *module, PyObject *args)
{
    PyObject *from, *to;
    long size;
    Py_buffer views[2] = {{0}};
    if (!PyArg_ParseTuple(args, "OlO:normalize", &from, &size, &to))
        return NULL;
    if (size < 1)
        return PyErr_Format(PyExc_ValueError, "a minibatch has at least one sample, not %ld", size);
    int failed = get_floats(from, &views[0], 1, SHAPE(-1), 0, "advantages") < 0 ||
                 get_floats(to, &views[1], 1, SHAPE(views[0].shape[0]), 1, "out") < 0;
    for (long start = 0, n = failed ? 0 : views[0].shape[0]; start < n; start += size)
        normalize_part((float *)views[0].buf + start, (float *)views[1].buf + start, n - start < size ? n - start : size);
    PyBuffer_Release(&views[0]), PyBuffer_Release(&views[1]);
    return failed ? NULL : Py_NewRef(Py_None);
}
