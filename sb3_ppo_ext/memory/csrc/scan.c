/*
 * Linear recurrences on the CPU: h_t = kept_t * h_{t-1} + added_t for all steps t, one after the other, in a pass through
 * memory. With operations of PyTorch, a parallel scan goes through it once for each power of two of the number of steps.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

/* Numbers of a state that are computed together, so that they stay in the cache; even, for complex numbers */
#define BLOCK 64

/* Make a step. The state is in double precision, so that rounding does not add up over many steps. */
static void advance_real(double *restrict state, const float *restrict kept, float *restrict added, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        added[i] = (float)(state[i] = kept[i] * state[i] + added[i]);
}

/* The same for complex numbers, of which `n` counts the real and imaginary parts */
static void advance_complex(double *restrict state, const float *restrict kept, float *restrict added, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i += 2) {
        double real = kept[i] * state[i] - kept[i + 1] * state[i + 1] + added[i];
        double imaginary = kept[i] * state[i + 1] + kept[i + 1] * state[i] + added[i + 1];
        added[i] = (float)(state[i] = real);
        added[i + 1] = (float)(state[i + 1] = imaginary);
    }
}

static void scan_steps(const float *kept, float *added, Py_ssize_t n_steps, Py_ssize_t n, int is_complex, int is_reversed)
{
    for (Py_ssize_t start = 0; start < n; start += BLOCK) {
        double state[BLOCK] = {0};
        Py_ssize_t size = n - start < BLOCK ? n - start : BLOCK;
        for (Py_ssize_t i = 0; i < n_steps; i++) {
            Py_ssize_t step = is_reversed ? n_steps - 1 - i : i;
            /* The factor of the first of these steps multiplies zeros, whichever it is. */
            const float *factors = kept + (is_reversed && i > 0 ? step + 1 : step) * n + start;
            (is_complex ? advance_complex : advance_real)(state, factors, added + step * n + start, size);
        }
    }
}

/* Whether an array is in float32, of shape (n_steps, n_units) or (n_steps, n_units, 2) */
static int is_valid(const Py_buffer *view)
{
    return strcmp(view->format, "f") == 0 && (view->ndim == 2 || (view->ndim == 3 && view->shape[2] == 2));
}

static PyObject *scan_views(const Py_buffer *kept, const Py_buffer *added, int is_reversed)
{
    if (!is_valid(kept) || !is_valid(added) || kept->ndim != added->ndim ||
        memcmp(kept->shape, added->shape, (size_t)added->ndim * sizeof(Py_ssize_t)) != 0) {
        PyErr_SetString(PyExc_ValueError,
                        "give arrays in float32 of the same shape, (n_steps, n_units) or (n_steps, n_units, 2)");
        return NULL;
    }
    int is_complex = added->ndim == 3;
    Py_ssize_t n = added->shape[1] * (is_complex ? 2 : 1);
    Py_BEGIN_ALLOW_THREADS scan_steps(kept->buf, added->buf, added->shape[0], n, is_complex, is_reversed);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
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
