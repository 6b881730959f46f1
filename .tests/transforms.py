"""Every kind of derivative and transform, as functions (f, tensors, random) -> tensors.

f is a function of the tensors, and random(t) returns a random direction of t's shape and dtype. Each call of a
transform draws the same directions, whatever the dtypes, so that the results can be compared with those in float64.
"""

import itertools

import torch
from reference import FIRST_SEED, formula
from torch.utils.checkpoint import checkpoint

forward_ad, func = torch.autograd.forward_ad, torch.func


class Random:
    """Draws directions that every dtype represents."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(FIRST_SEED + 1)

    def __call__(self, t):
        return torch.randn(t.shape, generator=self.generator).bfloat16().to(t.device, t.dtype)

    def of(self, tensors):
        return tuple(self(t) for t in tensors)

    def batch(self, tensors, dim=0):
        """Returns the tensors with another dimension of size 2, over which vmap can map."""
        return tuple(torch.stack([t, self(t)], dim) for t in tensors)


def leaves_of(tensors, mask=None):
    wanted = mask or [True] * len(tensors)
    return [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted)]


def gradients(outputs, inputs, directions, **options):
    """Returns the gradients of inputs. Those of inputs that do not matter are zeros."""
    found = torch.autograd.grad(outputs, inputs, directions, allow_unused=True, **options)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found)]


def backward(f, tensors, random):
    leaves = leaves_of(tensors)
    y = f(*leaves)
    return gradients(y, leaves, random(y))


def backward_of_each_subset(f, tensors, random):
    """A kernel computes only the gradients of inputs that need one."""
    results = []
    for mask in itertools.product((False, True), repeat=len(tensors)):
        if any(mask):
            leaves = leaves_of(tensors, mask)
            y = f(*leaves)
            results += gradients(y, [t for t in leaves if t.requires_grad], random(y))
    return results


def double_backward(f, tensors, random):
    leaves = leaves_of(tensors)
    y = f(*leaves)
    v = random(y).requires_grad_()
    first = gradients(y, leaves, v, create_graph=True)
    return first + gradients(first, [v, *leaves], random.of(first))


def double_backward_of_each_gradient(f, tensors, random):
    """The gradients that are differentiated may be those of one input only."""
    results = []
    for i in range(len(tensors)):
        leaves = leaves_of(tensors)
        y = f(*leaves)
        v = random(y).requires_grad_()
        first = gradients(y, [leaves[i]], v, create_graph=True)
        results += gradients(first, [v, *leaves], random.of(first))
    return results


def double_backward_for_each_input(f, tensors, random):
    """All gradients are differentiated, but only with respect to one tensor."""
    results = []
    for i in range(len(tensors) + 1):
        mask = [i == j for j in range(len(tensors) + 1)]
        leaves = leaves_of(tensors)
        y = f(*leaves)
        v = random(y).requires_grad_()
        first = gradients(y, leaves, v, create_graph=True)
        results += gradients(first, [t for t, want in zip((v, *leaves), mask) if want], random.of(first))
    return results


def checkpointed(f, tensors, random):
    results = []
    for use_reentrant in (False, True):
        leaves = leaves_of(tensors)
        y = checkpoint(f, *leaves, use_reentrant=use_reentrant)
        y.backward(random(y))
        results += [y.detach(), *(t.grad for t in leaves)]
    return results


def batched_backward(f, tensors, random):
    leaves = leaves_of(tensors)
    y = f(*leaves)
    return gradients(y, leaves, random.batch([y])[0], is_grads_batched=True)


def jvp_by_double_backward(f, tensors, random):
    return torch.autograd.functional.jvp(f, tensors, random.of(tensors))


def jvp(f, tensors, random):
    return func.jvp(f, tensors, random.of(tensors))


def jvp_of_each_input(f, tensors, random):
    results = []
    for i, t in enumerate(tensors):
        results += func.jvp(lambda t, i=i: f(*tensors[:i], t, *tensors[i + 1 :]), (t,), (random(t),))
    return results


def linearize(f, tensors, random):
    return func.linearize(f, *tensors)[1](*random.of(tensors))


def dual_numbers(f, tensors, random):
    with forward_ad.dual_level():
        y = f(*(forward_ad.make_dual(t, random(t)) for t in tensors))
        return list(forward_ad.unpack_dual(y))


def dual_numbers_and_backward(f, tensors, random):
    """Forward over reverse, then the gradients of the tangent, which is reverse over forward."""
    leaves = leaves_of(tensors)
    with forward_ad.dual_level():
        y = f(*(forward_ad.make_dual(t, random(t)) for t in leaves))
        primal, tangent = forward_ad.unpack_dual(y)
        dual = forward_ad.make_dual(random(primal), random(primal))
        found = torch.autograd.grad(y, leaves, dual, retain_graph=True, allow_unused=True)
        results = [forward_ad.unpack_dual(g).primal for g in found]
        results += [t for g in found if (t := forward_ad.unpack_dual(g).tangent) is not None]
        if not tangent.requires_grad:  # as that of bias alone
            return results + [torch.zeros_like(t) for t in leaves]
        return results + gradients(tangent, leaves, random(tangent))


def vjp_function(f):
    """Returns the function that computes the gradients from the gradient of the output and the tensors."""
    return lambda v, *tensors: func.vjp(f, *tensors)[1](v)


def vjp(f, tensors, random):
    y, back = func.vjp(f, *tensors)
    return [y, *back(random(y))]


def jvp_of_vjp(f, tensors, random):
    inputs = (random(f(*tensors)), *tensors)
    return func.jvp(vjp_function(f), inputs, random.of(inputs))


def vjp_of_vjp(f, tensors, random):
    results, back = func.vjp(vjp_function(f), random(f(*tensors)), *tensors)
    return back(random.of(results))


def vjp_of_jvp(f, tensors, random):
    tangents = random.of(tensors)
    y, back = func.vjp(lambda *tensors: func.jvp(f, tensors, tangents)[1], *tensors)
    return [y, *back(random(y))]


def jvp_of_jvp(f, tensors, random):
    tangents = random.of(tensors)
    return func.jvp(lambda *tensors: func.jvp(f, tensors, tangents), tensors, random.of(tensors))


def functionalized(f, tensors, random):
    return func.functionalize(vjp_function(f))(random(f(*tensors)), *tensors)


def vmap_over_each_input(f, tensors, random):
    results, batched = [], random.batch(tensors)
    for i in range(len(tensors)):
        in_dims = tuple(0 if i == j else None for j in range(len(tensors)))
        results.append(torch.vmap(f, in_dims)(*tensors[:i], batched[i], *tensors[i + 1 :]))
    return results


def vmap_over_all(f, tensors, random):
    return torch.vmap(f)(*random.batch(tensors))


def vmap_over_the_last_dimension(f, tensors, random):
    return torch.vmap(f, -1, -1)(*random.batch(tensors, dim=-1))


def vmap_of_vmap(f, tensors, random):
    twice = random.batch(random.batch(tensors))
    inner = torch.vmap(f, (1, *[None] * (len(tensors) - 1)))  # the inner vmap maps the first tensor only
    return [torch.vmap(torch.vmap(f))(*twice), torch.vmap(inner)(twice[0].movedim(1, 2), *random.batch(tensors[1:]))]


def vmap_of_jvp(f, tensors, random):
    return torch.vmap(lambda *tangents: func.jvp(f, tensors, tangents))(*random.batch(random.of(tensors)))


def jvp_of_vmap(f, tensors, random):
    batched = random.batch(tensors)
    return func.jvp(torch.vmap(f), batched, random.of(batched))


def vmap_of_grad(f, tensors, random):
    """Gradients of each sample: of one that all tensors have, and of one that only the first tensor has."""
    v, batched = random(f(*tensors)), random.batch(tensors)
    only_first = (None, 0, *[None] * (len(tensors) - 1))
    mapped = torch.vmap(vjp_function(f), (None, *[0] * len(tensors)))(v, *batched)
    return [mapped, torch.vmap(vjp_function(f), only_first)(v, batched[0], *tensors[1:])]


def grad_of_vmap(f, tensors, random):
    mapped, batched = torch.vmap(f), random.batch(tensors)
    return [vjp(mapped, batched, random), backward(mapped, batched, random)]


def vmap_of_vjp_of_vjp(f, tensors, random):
    results = vjp_function(f)(v := random(f(*tensors)), *tensors)
    directions = random.of(results)
    in_dims = (None, *[0] * len(tensors))
    return torch.vmap(lambda v, *t: func.vjp(vjp_function(f), v, *t)[1](directions), in_dims)(v, *random.batch(tensors))


def vjp_of_vmap_of_vjp(f, tensors, random):
    v, batched = random(f(*tensors)), random.batch(tensors)
    mapped = torch.vmap(vjp_function(f), (None, *[0] * len(tensors)))
    results, back = func.vjp(mapped, v, *batched)
    return back(random.of(results))


def jacobians(f, tensors, random):
    argnums = tuple(range(len(tensors)))
    return [jacobian(f, argnums)(*tensors) for jacobian in (func.jacrev, func.jacfwd)]


def hessians(f, tensors, random):
    v, argnums = random(f(*tensors)), tuple(range(len(tensors)))

    def loss(*tensors):
        y = f(*tensors)
        return (y * y * v).sum()

    return [
        outer(inner(loss, argnums), argnums)(*tensors)
        for outer, inner in ((func.jacfwd, func.jacrev), (func.jacrev, func.jacrev), (func.jacrev, func.jacfwd))
    ]


TRANSFORMS = {
    "forward": lambda f, tensors, random: f(*tensors),
    **{
        transform.__name__: transform
        for transform in (
            backward, backward_of_each_subset, double_backward, double_backward_of_each_gradient,
            double_backward_for_each_input, checkpointed, batched_backward, jvp_by_double_backward, jvp,
            jvp_of_each_input, linearize, dual_numbers, dual_numbers_and_backward, vjp, jvp_of_vjp, vjp_of_vjp,
            vjp_of_jvp, jvp_of_jvp, functionalized, vmap_over_each_input, vmap_over_all, vmap_over_the_last_dimension,
            vmap_of_vmap, vmap_of_jvp, jvp_of_vmap, vmap_of_grad, grad_of_vmap, vmap_of_vjp_of_vjp, vjp_of_vmap_of_vjp,
            jacobians, hessians,
        )
    },
}  # fmt: skip
if not hasattr(func, "linearize"):  # PyTorch 2.0
    del TRANSFORMS["linearize"]


def composed(x, shape, weight, bias, eps, activation=None, scale=1.0, dtype=None):
    """Computes layer_norm with PyTorch's elementary operations, in float32 or float64. Returns input's or this dtype."""
    x32, *affine = (t if t is None or t.dtype == torch.float64 else t.float() for t in (x, weight, bias))
    y = formula(x32, *affine, activation, scale, tuple(range(-len(shape), 0)), eps)
    return y.to(x.dtype if x.dtype == torch.float64 else dtype or x.dtype)


def leaves(results):
    return torch.utils._pytree.tree_flatten(results)[0]


def difference(transform, function, reference, tensors, rounding=2e-5, factor=3.0):
    """Returns a sentence on how results of function under a transform are wrong, or "".

    Their shapes and dtypes must be those of reference, a function of the same tensors. The largest error must be at most
    `factor` times that of reference plus `rounding` (in 16 bits, at least four times their epsilon), against float64.
    """
    results, expected, exact = (
        leaves(TRANSFORMS[transform](f, tuple(given), Random()))
        for f, given in ((function, tensors), (reference, tensors), (reference, [t.double() for t in tensors]))
    )
    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}"
    for i, (result, other, right) in enumerate(zip(results, expected, exact)):
        if (result.shape, result.dtype) != (other.shape, other.dtype):
            return f"result {i} is {result.dtype} {[*result.shape]} instead of {other.dtype} {[*other.shape]}"
        if not torch.equal(result.isnan(), right.isnan()):
            return f"result {i} is NaN in other places"
        error, allowed = (
            (t.double() - right).abs().nan_to_num(0).max().item() if t.numel() else 0.0 for t in (result, other)
        )
        most = right.abs().nan_to_num(0).max().item() if right.numel() else 0.0
        bound = factor * allowed + max(rounding, 4 * torch.finfo(result.dtype).eps) * max(1.0, most)
        if not error <= bound:
            return f"result {i}: error {error:.2e} instead of at most {bound:.2e}"
    return ""
