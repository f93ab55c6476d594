/*
 * Generalised advantage estimation.
 */

#pragma once

#include "arrays.h"

static void estimate(const Py_buffer *views, long n, long n_envs, float discount, float decay)
{
    const float *rewards = views[0].buf, *values = views[1].buf, *starts = views[2].buf;
    const float *last_values = views[3].buf, *dones = views[4].buf;
    float *advantages = views[5].buf;
    for (long i = n - n_envs; n_envs > 0 && i >= 0; i -= n_envs)
        for (long j = 0; j < n_envs; j++) {
            int last = i + n_envs >= n;
            float goes_on = 1.0f - (last ? dones[j] : starts[i + n_envs + j]);
            float next = last ? last_values[j] : values[i + n_envs + j];
            float delta = rewards[i + j] + discount * next * goes_on - values[i + j];
            advantages[i + j] = delta + decay * goes_on * (last ? 0.0f : advantages[i + n_envs + j]);
        }
}

PyDoc_STRVAR(gae_doc,
             "gae(rewards, values, episode_starts, last_values, dones, gamma, gae_lambda, advantages)\n\n"
             "Write the advantages of a rollout. Arrays of the rollout have shape (n_steps, n_envs), others (n_envs,).");
static PyObject *gae(PyObject *module, PyObject *args)
{
    static const char *names[] = {"rewards", "values", "episode_starts", "last_values", "dones", "advantages"};
    PyObject *arrays[6];
    Py_buffer views[6] = {{0}};
    double gamma, gae_lambda;
    if (!PyArg_ParseTuple(args, "OOOOOddO:gae", &arrays[0], &arrays[1], &arrays[2], &arrays[3], &arrays[4], &gamma,
                          &gae_lambda, &arrays[5]))
        return NULL;
    if (!isfinite(gamma + gae_lambda)) {
        PyErr_SetString(PyExc_ValueError, "gamma and gae_lambda must be finite");
        return NULL;
    }
    /* The last values have the shape (n_envs,), the rewards (n_steps, n_envs); the others are checked against these. */
    static const int order[] = {3, 4, 0, 1, 2, 5};
    long n_envs = -1, n_steps = -1;
    int failed = 0;
    for (int i = 0; i < 6 && !failed; i++) {
        int which = order[i];
        failed = get_floats(arrays[which], &views[which], i < 2 ? 1 : 2, i < 2 ? SHAPE(n_envs) : SHAPE(n_steps, n_envs),
                            which == 5, names[which]);
        if (!failed && i == 0)
            n_envs = views[which].shape[0];
        if (!failed && i == 2)
            n_steps = views[which].shape[0];
    }
    if (!failed)
        estimate(views, n_steps * n_envs, n_envs, (float)gamma, (float)(gamma * gae_lambda));
    for (int i = 0; i < 6; i++)
        PyBuffer_Release(&views[i]);
    return failed ? NULL : Py_NewRef(Py_None);
}
