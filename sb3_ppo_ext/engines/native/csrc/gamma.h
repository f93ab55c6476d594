/*
 * The logarithm of the gamma function and its first two derivatives.
 */

#pragma once

#include <math.h>

struct gammas {
    double log, first, second;
};

/* For x of at least 1: recurrences up to 8, and from there the asymptotic series (https://dlmf.nist.gov/5.11) */
static struct gammas gammas_of(double x)
{
    double product = 1, inverses = 0, squares = 0;
    for (; x < 8; x += 1) {
        double inverse = 1 / x;
        product *= x, inverses += inverse, squares += inverse * inverse;
    }
    double i = 1 / x, q = i * i, log_x = log(x);
    double of_log = i * (1. / 12 - q * (1. / 360 - q * (1. / 1260 - q * (1. / 1680 - q * (1. / 1188)))));
    double of_first = q * (1. / 12 - q * (1. / 120 - q * (1. / 252 - q * (1. / 240 - q * (1. / 132)))));
    double of_second = i * q * (1. / 6 - q * (1. / 30 - q * (1. / 42 - q * (1. / 30 - q * (5. / 66)))));
    return (struct gammas){
        .log = (x - 0.5) * log_x - x + 0.91893853320467274 + of_log - log(product),
        .first = log_x - i / 2 - of_first - inverses,
        .second = i + q / 2 + of_second + squares,
    };
}
