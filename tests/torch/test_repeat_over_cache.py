"""Repeated calls over a KV cache take a short way to the same bits; all others go the whole way."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import cupy_flash
import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, LatentCache, kv_cache, progress
from cupy_flash.dispatch import memo
from cupy_flash.torch import repeat_in_core, repeat_over_cache

# torch compiles with, and warns of, its own torch.jit.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

BATCH, HEADS_Q, HEADS_K, ROOM, DIM, PAGE = 2, 4, 2, 16, 8, 4


@pytest.fixture(autouse=True, params=["by guards", "without guards"])
def whole(monkeypatch, request):
    """How many calls went the whole way, beginning with nothing remembered; without torch's guards all do."""
    memo.forget()
    if request.param == "without guards":
        monkeypatch.setattr(repeat_in_core, "_guards", None)
    calls = []
    real = kv_cache.attend_over_cache
    monkeypatch.setattr(kv_cache, "attend_over_cache", lambda *given: (calls.append(given), real(*given))[1])
    yield calls
    memo.forget()


def short(whole, all_calls, at_least):
    """Whether so many calls went the whole way: all of them without torch's guards."""
    return len(whole) == (at_least if repeat_in_core._guards else all_calls)


def call_of(
    seed=0, *, layout="bhsd", dtype=torch.float32, lengths="tensor", new=0, paged=False, pad=False, rows=1
):
    """Arguments of a call, of other numbers for each seed."""
    rng = torch.Generator().manual_seed(seed)

    def draw(batch, heads, seq):
        shape = (batch, heads, seq, DIM) if layout == "bhsd" else (batch, seq, heads, DIM)
        return torch.randn(shape, generator=rng).to(dtype)

    slots, room = (BATCH * ROOM // PAGE, PAGE) if paged is True else (BATCH, ROOM)
    given = {"q": draw(BATCH, HEADS_Q, rows)} | {f"{n}_cache": draw(slots, HEADS_K, room) for n in "kv"}
    used = torch.randint(3, ROOM - 3, (BATCH,), generator=rng, dtype=torch.int32)
    given["cache_seqlens"] = used if lengths == "tensor" else int(used[0])
    if new:
        given |= {n: draw(BATCH, HEADS_K, new) for n in "kv"}
    if paged == "slots":  # before the new keys
        given = {"block_table": torch.randperm(BATCH, generator=rng, dtype=torch.int32)} | given
    elif paged:
        given["block_table"] = torch.randperm(slots, generator=rng, dtype=torch.int32).reshape(BATCH, -1)
    if pad:
        given["cache_leftpad"] = torch.randint(0, 3, (BATCH,), generator=rng, dtype=torch.int32)
    return given | {"layout": layout}


def run(given, **options):
    given = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    results = cf.attention_with_kv_cache(**given, **options)
    return (*(results if isinstance(results, tuple) else (results,)), given["k_cache"], given["v_cache"])


def same(given, wanted):
    return all(map(torch.equal, given, wanted)) and len(given) == len(wanted)


KINDS = [
    {},
    {"lengths": "one"},
    {"lengths": "one", "new": 2, "rows": 2},
    {"new": 1, "paged": True, "layout": "bshd"},
    {"new": 1, "paged": "slots"},
    {"pad": True, "dtype": torch.bfloat16},
    {"new": 1, "layout": "bshd", "dtype": torch.float64},
]
OPTIONS = [
    {},
    {"return_lse": True},
    {"causal": True, "window": (5, 0)},
    {"scale": 0.3, "softcap": 5.0, "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_another_call_of_the_same_kinds_has_the_bits_of_the_whole_way(kind, options, whole):
    calls = [call_of(seed, **kind) for seed in range(3)]
    given = [run(call, **options) for call in calls]
    assert short(whole, 3, 3 if kind.get("paged") == "slots" else 1)
    for call, o in zip(calls, given, strict=True):
        memo.forget()
        assert same(o, run(call, **options))


def moved(x):
    """The same values four bytes off a boundary."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


LATER = {
    "queries": lambda c: c | {"q": torch.cat([c["q"], c["q"]], 2)},
    "room": lambda c: c | {n: c[n][:, :, :-1].contiguous() for n in ("k_cache", "v_cache")},
    "strides": lambda c: c | {"k_cache": c["k_cache"].mT.contiguous().mT},
    "dtype": lambda c: {n: x.double() if n in ("q", "k_cache", "v_cache") else x for n, x in c.items()},
    "one length": lambda c: c | {"cache_seqlens": 7},
    "window": lambda c: c | {"window": (2, 0)},
    "scale": lambda c: c | {"scale": 0.5},
    "lse": lambda c: c | {"return_lse": True},
    "new keys": lambda c: c | {"k": c["q"][:, :2].clone(), "v": c["q"][:, :2].clone()},
    "padding": lambda c: c | {"cache_leftpad": torch.ones(BATCH, dtype=torch.int32)},
    "slots": lambda c: c | {"block_table": torch.tensor([1, 0], dtype=torch.int32)},
    "mask": lambda c: c | {"mask": torch.arange(ROOM) % 3 > 0},
    "scale of heads": lambda c: c | {"scale": torch.linspace(0.2, 0.5, HEADS_Q)},
    "sinks": lambda c: c | {"sinks": torch.linspace(-1, 1, HEADS_Q)},
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_other_kinds_go_the_whole_way(name, whole):
    later = LATER[name](call_of())
    wanted = run(later)
    memo.forget()
    whole.clear()
    run(call_of())
    assert same(run(later), wanted)
    assert len(whole) == 2


def test_values_that_are_the_first_columns_of_keys_are_latents(whole):
    q, latents, lengths = call_of()["q"], torch.randn(BATCH, HEADS_K, ROOM, DIM), torch.tensor([3, 9])
    other = torch.randn(BATCH, HEADS_K, ROOM, DIM)
    views = [(latents, x[..., : DIM // 2]) for x in (latents, other, latents, other)]
    given = [cf.attention_with_kv_cache(q, *view, cache_seqlens=lengths.int()) for view in views]
    assert torch.equal(given[0], given[2])
    assert torch.equal(given[1], given[3])
    wide = cf.attention_with_kv_cache(q, LatentCache(latents, DIM // 2), cache_seqlens=lengths.int())
    assert torch.equal(given[0], wide)
    assert short(whole, 5, 4)


@pytest.mark.parametrize(("name", "values"), [("scale", (0.5, 0.25)), ("window", ((2, 0), (9, 0)))])
def test_values_of_options_count(name, values, whole):
    given = call_of()
    first, other = (run(given, **{name: value}) for value in values)
    assert not torch.equal(first[0], other[0])
    assert same(run(given, **{name: values[0]}), first)
    assert short(whole, 3, 2)


@pytest.mark.parametrize("name", ["scale", "window"])
def test_a_number_that_can_change_is_not_remembered(name):
    given, changing = call_of(), torch.tensor(1)

    def of(number):
        return {name: number if name == "scale" else (number, 0)}

    for number in (1, 1, 3):
        changing.fill_(number)
        found = cf.attention_with_kv_cache(**given, **of(changing))
        assert torch.equal(found, cf.attention_with_kv_cache(**given, **of(number)))


def test_what_lies_off_a_boundary_goes_the_whole_way(whole):
    given = call_of()
    wanted = cf.attention_with_kv_cache(**given)
    torch.testing.assert_close(cf.attention_with_kv_cache(**given | {"q": moved(given["q"])}), wanted)
    assert len(whole) == 2


def test_freed_memory_is_not_read(whole):
    given = call_of()
    for _ in range(2):
        cf.attention_with_kv_cache(**given)
    given["k_cache"].untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentsError, match="resized to 0"):
        cf.attention_with_kv_cache(**given)


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "longer than the cache": ({}, {"cache_seqlens": integers(3, ROOM + 1)}, r"seqlens\[1\] is 17"),
    "negative": ({}, {"cache_seqlens": integers(-1, 3)}, r"seqlens\[0\] is -1"),
    "one length too long": ({"lengths": "one"}, {"cache_seqlens": ROOM + 1}, "seqlens is 17"),
    "no room for new keys": ({"lengths": "one", "new": 2}, {"cache_seqlens": ROOM - 1}, "15 plus 2 new"),
    "beyond 31 bits": ({"lengths": "one"}, {"cache_seqlens": 2**31}, "31 bits"),
    "no such pages": ({"paged": True}, {"block_table": integers(*[[99] * 4] * 2)}, "99; the cache has 8"),
    "padding behind the keys": ({"pad": True}, {"cache_leftpad": integers(ROOM, 0)}, r"leftpad\[0\] is 16"),
    "a flag that is a number": ({}, {"causal": 1}, "causal"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_is_refused_of_a_repeated_call(name):
    kind, wrong, says = WRONG[name]
    given = call_of(**kind)
    for options in ({}, {"causal": True}, {"window": (1, 0)}):
        run(given | options)
    for _ in range(2):
        with pytest.raises(InvalidArgumentsError, match=says):
            run(given | wrong)


def test_gradients_are_refused_and_may_be_done_without():
    given = call_of()
    wanted = cf.attention_with_kv_cache(**given)
    leaf = given | {"q": given["q"].clone().requires_grad_()}
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(cf.attention_with_kv_cache(**leaf), wanted)
        with pytest.raises(InvalidArgumentsError, match="requires grad"):
            cf.attention_with_kv_cache(**leaf)


def test_the_environment_counts(monkeypatch):
    given = call_of()
    wanted = cf.attention_with_kv_cache(**given)
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    for _ in range(2):
        torch.testing.assert_close(cf.attention_with_kv_cache(**given), wanted)
        assert "NumPy" in memo.kernels()


def test_progress_and_compilers_look_on():
    given = call_of()
    wanted = cf.attention_with_kv_cache(**given)
    told = []
    with progress(told.append):
        cf.attention_with_kv_cache(**given)
    assert told
    compiled = torch.compile(
        lambda **given: cf.attention_with_kv_cache(**given), backend="aot_eager", fullgraph=True
    )
    for _ in range(2):
        torch.testing.assert_close(compiled(**given), wanted)
    rest = {name: x for name, x in given.items() if name != "q"}
    attend = lambda q: cf.attention_with_kv_cache(q, **rest)  # noqa: E731
    graph = torch.fx.experimental.proxy_tensor.make_fx(attend)(given["q"])
    torch.testing.assert_close(graph(2 * given["q"]), attend(2 * given["q"]))


def test_it_forgets(whole):
    given = call_of()
    cf.attention_with_kv_cache(**given)
    memo.forget()
    assert not memo.REPEATED
    cf.attention_with_kv_cache(**given)
    assert len(whole) == 2


def test_it_keeps_no_tensor_alive(whole):
    import gc
    import weakref

    given = call_of()
    for _ in range(2):
        cf.attention_with_kv_cache(**given)
    kept = [weakref.ref(x) for x in given.values() if isinstance(x, torch.Tensor)]
    del given
    whole.clear()
    gc.collect()
    assert not any(x() is not None for x in kept)


def test_quantized_caches_go_the_whole_way():
    given = call_of()
    cf.attention_with_kv_cache(**given)
    codes = torch.ones(BATCH, HEADS_K, ROOM, DIM, dtype=torch.int8)
    cache = {n: cupy_flash.QuantizedCache(codes, torch.ones(HEADS_K)) for n in ("k_cache", "v_cache")}
    for _ in range(2):
        o = cf.attention_with_kv_cache(**given | cache)
        torch.testing.assert_close(o, torch.ones_like(o))


def test_tables_of_repeated_calls_are_read_once(monkeypatch):
    given = call_of(paged=True)
    exact = [cf.attention_with_kv_cache(**given) for _ in range(2)][1]
    of_arrays = repeat_over_cache.check_values

    def and_then_written(*args):
        of_arrays(*args)
        given["cache_seqlens"].fill_(2**30)
        given["block_table"].fill_(2**30)

    monkeypatch.setattr(repeat_over_cache, "check_values", and_then_written)
    monkeypatch.setattr(kv_cache, "check_values", and_then_written)
    torch.testing.assert_close(cf.attention_with_kv_cache(**given), exact, rtol=0, atol=0)
