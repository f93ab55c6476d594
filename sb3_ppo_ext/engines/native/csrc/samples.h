/*
 * Samples of Beta distributions, as `sample_beta` of `distributions/beta.py` makes them from given random numbers.
 */

#pragma once

#include <float.h>

#include "loss.h"

#define ROUNDS 8

/* A number with a gamma distribution whose shape is `d + 1 / 3`, from normal numbers and the logarithms of uniform ones */
static double gamma_sample(double d, const float *normal, const float *log_uniform)
{
    double first = 0, width = sqrt(9 * d);
    for (int i = 0; i < ROUNDS; i++) {
        double root = 1 + normal[i] / width, v = root * root * root;
        v = v < DBL_MIN ? DBL_MIN : v; /* NaN stays NaN. */
        if (log_uniform[i] < d * (1 - v + log(v)))
            return d * v;
        first = i ? first : d * v;
    }
    return first;
}

static void sample_row(const float *outputs, const float *noise, long n, double max_concentration, float *out)
{
    const float *log_uniform = noise + 2 * n * ROUNDS;
    for (long i = 0; i < n; i++) {
        double of_inputs[] = {softplus(outputs[i]), softplus(outputs[n + i])}, gammas[2];
        double shrink = 1 / (1 + (of_inputs[0] + of_inputs[1]) / max_concentration);
        for (int j = 0; j < 2; j++) {
            long at = (j * n + i) * ROUNDS;
            gammas[j] = gamma_sample(of_inputs[j] * shrink + 2. / 3, noise + at, log_uniform + at);
        }
        double x = gammas[0] / (gammas[0] + gammas[1]);
        out[i] = (float)(x < EDGE ? EDGE : x > 1 - EDGE ? 1 - EDGE : x);
    }
}

PyDoc_STRVAR(
    sample_beta_doc,
    "sample_beta(outputs, noise, max_concentration, out)\n\nWrite samples of Beta distributions. Noise has for each row "
    "normal numbers x and numbers log u - x^2 / 2, each for alpha and beta of each action, eight of them.");
static PyObject *sample_beta(PyObject *module, PyObject *args)
{
    PyObject *outputs, *noise, *out;
    double max_concentration;
    Py_buffer views[3] = {{0}};
    if (!PyArg_ParseTuple(args, "OOdO:sample_beta", &outputs, &noise, &max_concentration, &out))
        return NULL;
    if (!(max_concentration > 0) || isinf(max_concentration)) {
        PyErr_SetString(PyExc_ValueError, "max_concentration must be a positive number");
        return NULL;
    }
    int failed = get_floats(out, &views[0], 2, SHAPE(-1, -1), 1, "out") < 0;
    long rows = failed ? 0 : views[0].shape[0], n = failed ? 0 : views[0].shape[1];
    failed = failed || get_floats(outputs, &views[1], 2, SHAPE(rows, 2 * n), 0, "outputs") < 0 ||
             get_floats(noise, &views[2], 5, SHAPE(rows, 2, 2, n, ROUNDS), 0, "noise") < 0;
    for (long i = 0; i < rows && !failed; i++)
        sample_row((float *)views[1].buf + i * 2 * n, (float *)views[2].buf + i * 4 * n * ROUNDS, n, max_concentration,
                   (float *)views[0].buf + i * n);
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&views[i]);
    return failed ? NULL : Py_NewRef(Py_None);
}
