"""Score functions with autograd: gradients of q, k, v, bias, sinks and of the arguments that ask for one."""

from __future__ import annotations

from typing import Any

import torch

from ..api import adopted, run_backward, run_forward
from ..call.checks import flag
from ..call.opaque import opaque
from ..call.options import DIFFERENTIABLE, split
from ..errors import InvalidArguments, Unsupported
from ..program.function import Program
from .eager import are_untouched
from .given import cast_by_context, check_tensors
from .ops import first_derivative_only

__all__ = ["attend_by_function"]

_ARGUMENT = "score_args["


@opaque
def attend_by_function(q: Any, k: Any, v: Any, options: dict[str, Any], return_lse: bool) -> Any:
    """The result of a call with a score function, recorded if a gradient will be; torch.compile calls it.

    Parameters
    ----------
    q, k, v : Tensor
    options : dict of str to object
        Those that were given, score among them.
    return_lse : bool
    """
    deterministic = flag(options.pop("deterministic", False), "deterministic")
    arrays, values = split(options)
    q, k, v = cast_by_context(q, k, v)
    tensors = {"q": q, "k": k, "v": v, **arrays}
    check_tensors(("q", "k", "v"), **tensors)
    if not are_untouched(*tensors.values()):
        raise Unsupported(
            "a score function meets a transform of torch.",
            hint="the call outside of torch.func and of programs that are traced",
        )
    if not isinstance(values.score, Program):
        hint = "score=cupy_flash.score(f), made once, where f is your function"
        raise InvalidArguments(f"score is a {type(values.score).__name__}.", hint=hint)
    if values.dropout and values.seed is None:
        values = values._replace(seed=int(torch.randint(2**62, ())))
    wanted = [name for name, x in tensors.items() if x.requires_grad] if torch.is_grad_enabled() else []
    for name in wanted:
        if name not in ("q", "k", "v", *DIFFERENTIABLE) and not name.startswith(_ARGUMENT):
            raise Unsupported(f"{name} has no gradient.", hint=f"{name}.detach(), or what it adds as a bias")
    arguments = [name for name in tensors if name.startswith(_ARGUMENT)]
    learned = tuple(n for n, name in enumerate(arguments) if name in wanted)
    values = values._replace(score=values.score.learning(learned))
    if not wanted:
        return run_forward(adopted(**tensors), values, return_lse)
    return _Recorded.apply(tuple(tensors), values, deterministic, return_lse, *tensors.values())


class _Recorded(torch.autograd.Function):
    """One call in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, names: tuple[str, ...], values: Any, deterministic: bool, want_lse: bool, *tensors: Any
    ) -> Any:
        o, lse = run_forward(adopted(**dict(zip(names, tensors, strict=True))), values, True)
        ctx.save_for_backward(*tensors, o, lse)
        ctx.names, ctx.values, ctx.deterministic = names, values, deterministic
        ctx.set_materialize_grads(False)
        return (o, lse) if want_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        if do is None and dlse is None:
            return (None,) * (4 + len(ctx.names))
        *tensors, o, lse = saved = ctx.saved_tensors
        deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
        given = dict(zip(ctx.names, tensors, strict=True))
        with torch.no_grad():
            do = torch.zeros_like(o) if do is None else do
            raw = adopted(do=do, **given, o=o, lse=lse, dlse=dlse)
            found = run_backward(raw, ctx.values, deterministic)
        by_name = {name[1:]: grad for name, grad in found._asdict().items()}
        by_name |= {f"{_ARGUMENT}{n}]": grad for n, grad in enumerate(found.dscore_args or ())}
        grads = tuple(by_name.get(name) for name in ctx.names)
        return None, None, None, None, *first_derivative_only(grads, (do, dlse, *saved))
