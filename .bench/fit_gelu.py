"""Computes the coefficients of GELU's polynomials in layernorm_inline.py, with NumPy.

    python .bench/fit_gelu.py            prints the coefficients
    python .bench/fit_gelu.py --check    compares the largest errors with those of the file's coefficients

Coefficients are rounded to float32, which changes the largest errors by a few percent, and the last digits depend on
rounding errors of the fit. The file's coefficients may therefore differ in the last digits.

The kernels compute the tail of the standard normal distribution, 1 - Phi(t), as 2^p(t), and GELU's derivative at -t,
with density phi, as exp(-t^2 / 2) r(t). Each polynomial p and r has the smallest possible largest error on [0, end]:

    p    weight(t) |p(t) - log2(1 - Phi(t))|
    r    exp(-t^2 / 2) |r(t) - ratio(t)|, where ratio(t) = exp(t^2 / 2) (1 - Phi(t) - t phi(t))

The weight of p is 1 up to a point, and then decreases, because gelu(-t) = -t (1 - Phi(t)) decreases.
"""

import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

FILE = Path(__file__).resolve().parent.parent / "layernorm_inline.py"
POINTS = 20001  # where errors are measured


class Fit(NamedTuple):
    name: str
    terms: int  # number of coefficients
    end: float
    decrease: float = 0  # of the weight exp(-decrease (t - start)) of p, from start on
    start: float = 0


FITS = [  # in the order in which the file has them
    Fit("normal_tail", 11, 5.5, decrease=1.5, start=1.5),
    Fit("normal_tail_16_bits", 6, 7, decrease=2, start=4.3),
    Fit("ratio, 16 bits", 8, 6),
    Fit("ratio, float32", 12, 6),
    Fit("normal_tail_5_digits", 8, 9, decrease=1.5, start=4.3),
]


def tail(t):
    return np.array([math.erfc(x / math.sqrt(2)) / 2 for x in t])


def function_and_weight(fit, t):
    """Returns the values at t of the function that the polynomial approximates, and of the error's weight."""
    if fit.decrease:
        return np.log2(tail(t)), np.minimum(1, np.exp(-fit.decrease * (t - fit.start)))
    return np.exp(t * t / 2) * tail(t) - t / math.sqrt(2 * math.pi), np.exp(-t * t / 2)


def points(fit):
    return fit.end / 2 * (1 - np.cos(np.linspace(0, math.pi, POINTS)))  # closer together near both ends


def extrema(error):
    """Returns the index of the largest error between any two changes of its sign."""
    changes = np.flatnonzero(np.diff(np.sign(error))) + 1
    return [part[np.argmax(abs(error[part]))] for part in np.split(np.arange(len(error)), changes)]


def fitted(fit):
    """Returns the coefficients in float32, from the highest power to the constant.

    Remez' algorithm: solves for a polynomial whose errors at terms + 1 points are equal in size and alternate in sign,
    moves the points to the extrema of its error, and repeats.
    """
    t = points(fit)
    function, weight = function_and_weight(fit, t)
    powers = np.polynomial.chebyshev.chebvander(2 * t / fit.end - 1, fit.terms - 1)
    chosen = np.linspace(0, POINTS - 1, fit.terms + 1).astype(int)
    for _ in range(50):
        signs = (-1.0) ** np.arange(fit.terms + 1)
        system = np.column_stack([powers[chosen], signs / weight[chosen]])
        *solution, level = np.linalg.solve(system, function[chosen])
        error = weight * (powers @ solution - function)
        if abs(error).max() < (1 + 1e-7) * abs(level):
            break
        chosen = extrema(error)
        while len(chosen) > fit.terms + 1:  # the smaller one at an end goes
            del chosen[0 if abs(error[chosen[0]]) < abs(error[chosen[-1]]) else -1]
    else:
        raise ArithmeticError(f"{fit.name}: no convergence")
    return Chebyshev(solution, domain=[0, fit.end]).convert(kind=Polynomial).coef[::-1].astype(np.float32)


def largest_error(fit, coefficients):
    t = points(fit)
    function, weight = function_and_weight(fit, t)
    return abs(weight * (np.polyval(np.asarray(coefficients, float), t) - function)).max()


def literal(coefficient):
    text = f"{coefficient:.9g}"
    return text + ("f" if "." in text else ".0f")


def main():
    listed = [
        re.findall(r"-?\d[\d.e-]*(?=f)", text) for text in re.findall(r"polynomial\(t, ([^)]*)", FILE.read_text())
    ]
    assert [len(texts) for texts in listed] == [fit.terms for fit in FITS], "the file has other polynomials"
    is_accurate = True
    for fit, texts in zip(FITS, listed):
        new, old = fitted(fit), np.array(texts, np.float32)
        print(f"{fit.name}: {', '.join(map(literal, new))}")
        if "--check" in sys.argv:
            error, error_of_file = largest_error(fit, new), largest_error(fit, old)
            is_accurate &= error_of_file <= 1.01 * error
            difference = (abs(new / old - 1)).max()
            print(
                f"    largest error {error:.4g}; coefficients of the file {error_of_file:.4g}, differ by {difference:.1g}"
            )
    if not is_accurate:
        sys.exit("The file's coefficients have larger errors.")


if __name__ == "__main__":
    main()
