/*
 * Linear recurrences on the CPU: h_t = kept_t * h_{t-1} + added_t for all steps t, one after the other, in a pass through
 * memory. With operations of PyTorch, a parallel scan goes through it once for each power of two of the number of steps.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

/* Units that are computed together, so that they stay in the cache */
#define BLOCK 64

/* Make a step. The state is in double precision, so that rounding does not add up over many steps. */
static void advance_real(double *restrict state, const float *restrict kept, float *restrict added, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        added[i] = (float)(state[i] = kept[i] * state[i] + added[i]);
}

/* The same for complex numbers, whose imaginary parts are `n_units` behind their real parts */
static void advance_complex(double *restrict state, const float *restrict kept, float *restrict added, Py_ssize_t n,
                            Py_ssize_t n_units)
{
    const float *restrict kept_imaginary = kept + n_units;
    float *restrict added_imaginary = added + n_units;
    for (Py_ssize_t i = 0; i < n; i++) {
        double real = kept[i] * state[i] - kept_imaginary[i] * state[BLOCK + i] + added[i];
        double imaginary = kept[i] * state[BLOCK + i] + kept_imaginary[i] * state[i] + added_imaginary[i];
        added[i] = (float)(state[i] = real);
        added_imaginary[i] = (float)(state[BLOCK + i] = imaginary);
    }
}

static void scan_steps(const float *kept, float *added, Py_ssize_t n_steps, Py_ssize_t n_units, int is_complex,
                       int is_reversed)
{
    Py_ssize_t stride = is_complex ? 2 * n_units : n_units;
    for (Py_ssize_t start = 0; start < n_units; start += BLOCK) {
        double state[2 * BLOCK] = {0};
        Py_ssize_t n = n_units - start < BLOCK ? n_units - start : BLOCK;
        for (Py_ssize_t i = 0; i < n_steps; i++) {
            Py_ssize_t step = is_reversed ? n_steps - 1 - i : i;
            /* The factor of the first of these steps multiplies zeros, whichever it is. */
            const float *factors = kept + (is_reversed && i > 0 ? step + 1 : step) * stride + start;
            if (is_complex)
                advance_complex(state, factors, added + step * stride + start, n, n_units);
            else
                advance_real(state, factors, added + step * stride + start, n);
        }
    }
}

/* Whether an array is in float32, of shape (n_steps, n_units) or (n_steps, 2, n_units) */
static int is_valid(const Py_buffer *view)
{
    return strcmp(view->format, "f") == 0 && (view->ndim == 2 || (view->ndim == 3 && view->shape[1] == 2));
}

static PyObject *scan_views(const Py_buffer *kept, const Py_buffer *added, int is_reversed)
{
    if (!is_valid(kept) || !is_valid(added) || kept->ndim != added->ndim ||
        memcmp(kept->shape, added->shape, (size_t)added->ndim * sizeof(Py_ssize_t)) != 0) {
        PyErr_SetString(PyExc_ValueError,
                        "give arrays in float32 of the same shape, (n_steps, n_units) or (n_steps, 2, n_units)");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    scan_steps(kept->buf, added->buf, added->shape[0], added->shape[added->ndim - 1], added->ndim == 3, is_reversed);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *scan(PyObject *module, PyObject *args)
{
    PyObject *factors, *summands;
    int is_reversed;
    Py_buffer kept, added;
    if (!PyArg_ParseTuple(args, "OOp", &factors, &summands, &is_reversed))
        return NULL;
    if (PyObject_GetBuffer(factors, &kept, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return NULL;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(summands, &added, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) == 0) {
        result = scan_views(&kept, &added, is_reversed);
        PyBuffer_Release(&added);
    }
    PyBuffer_Release(&kept);
    return result;
}

static PyMethodDef functions[] = {
    {"scan", scan, METH_VARARGS, "Turn summands into the states of a linear recurrence, in place."}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_scan", "Linear recurrences.", 0, functions, NULL};

PyMODINIT_FUNC PyInit__scan(void)
{
    return PyModuleDef_Init(&definition);
}
