"""The demo's transformer: its hand-written gradients, its cache, and that it learns."""

import importlib.util
import sys

import numpy as np
import pytest

from cupy_flash import Rotary, attention_with_kv_cache
from cupy_flash import __main__ as package
from tests.paths import ROOT

TINY = {"vocabulary": 7, "context": 12, "layers": 2, "heads": 2, "width": 8}


def load(name):
    """Import a file of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_file():
    return load("demo_model")


@pytest.fixture
def tiny(model_file):
    return model_file.Transformer(np, model_file.Sizes(**TINY), seed=3, dtype="float64")


def some_text(rows, columns, seed=0):
    return np.random.default_rng(seed).integers(0, TINY["vocabulary"], (rows, columns))


def test_gradients_of_the_whole_transformer_against_finite_differences(tiny):
    text = some_text(2, TINY["context"] + 2)

    def loss():
        return tiny.loss(text[:, :-1], text[:, 2:])

    _, back = loss()
    back()
    gradients = dict(tiny.gradients)
    assert gradients.keys() == tiny.weights.keys()
    random = np.random.default_rng(1)
    h = 1e-5
    for name, weight in tiny.weights.items():
        direction = random.standard_normal(weight.shape)
        start = weight.copy()
        weight[:] = start + h * direction
        above = loss()[0]
        weight[:] = start - h * direction
        below = loss()[0]
        weight[:] = start
        expected = (above - below) / (2 * h)
        np.testing.assert_allclose((gradients[name] * direction).sum(), expected, rtol=1e-6, err_msg=name)


def test_a_cached_text_scores_as_the_whole_text(tiny):
    text = some_text(2, TINY["context"] + 1)
    whole = tiny.logits(text)[0].reshape(2, -1, TINY["vocabulary"])
    heads, features = TINY["heads"], TINY["width"] // TINY["heads"]
    nothing = np.zeros((2, 0, heads, features))
    cache = [(nothing, nothing)] * TINY["layers"]
    parts = [tiny.logits(text[:, start : stop + 1], cache)[0] for start, stop in ((0, 5), (5, 6), (6, 12))]
    parts = [part.reshape(2, -1, TINY["vocabulary"]) for part in parts]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-10, atol=1e-12)


def test_what_follows_does_not_change_what_is_scored(tiny):
    text = some_text(1, TINY["context"] + 1)
    changed = text.copy()
    changed[0, 8:] = (changed[0, 8:] + 1) % TINY["vocabulary"]
    np.testing.assert_array_equal(tiny.logits(text)[0][:7], tiny.logits(changed)[0][:7])


def test_drawn_text_is_a_function_of_the_seed(tiny):
    text = some_text(3, 3)
    drawn = tiny.continued(text, 6, seed=1)
    assert drawn.shape == (3, 9)
    np.testing.assert_array_equal(drawn[:, :3], text)
    np.testing.assert_array_equal(drawn, tiny.continued(text, 6, seed=1))
    assert (drawn != tiny.continued(text, 6, seed=2)).any()


@pytest.fixture(scope="module")
def train_file(model_file):
    pytest.importorskip("tqdm", reason="the demo shows a progress bar with tqdm, which is not installed")
    return load("demo_train")


def test_text_to_numbers_and_back(train_file):
    corpus = train_file.Corpus.of("abc\n" * 30 + "é", "cab\n✓")
    assert corpus.alphabet == "\nabc\ufffd"
    assert corpus.text(corpus.number("a\nb✓")) == "a\nb\ufffd"
    assert corpus.text(corpus.held_out) == "cab\n\ufffd"
    assert corpus.unigram_bits() == pytest.approx(np.log2(5))


def test_it_learns(train_file, model_file):
    corpus = train_file.Corpus.of("one two three. " * 200, "one two three. " * 20)
    model = model_file.Transformer(np, model_file.Sizes(len(corpus.alphabet), 24, 1, 2, 16))
    before = train_file.held_out_bits(model, corpus.held_out, count=8)
    losses = list(train_file.train(model, corpus.train, steps=60))
    after = train_file.held_out_bits(model, corpus.held_out, count=8)
    assert len(losses) == 60
    assert after < 0.5 * corpus.unigram_bits() < before
    assert [name for name, *_ in train_file.attention_errors(model, corpus.held_out)] == [
        "o", "lse", "dq", "dk", "dv",
    ]  # fmt: skip


def test_it_ends_with_a_picture(train_file, model_file, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib, which is not installed")
    sizes = model_file.Sizes(vocabulary=7, context=16, heads=2, width=8)
    assert train_file.picture(tmp_path / "new" / "demo.png", [5.0, 4.0, 3.5], 4.5, 3.4, sizes)
    assert (tmp_path / "new" / "demo.png").read_bytes()[1:4] == b"PNG"


def test_without_matplotlib_it_ends_without_one(train_file, model_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not train_file.picture(tmp_path / "demo.png", [1.0], 1.0, 1.0, model_file.Sizes(**TINY))
    assert list(tmp_path.iterdir()) == []


def test_what_to_try_next_is_there(train_file, capsys):
    assert len(train_file.NEXT) == 3
    for _, command in train_file.NEXT:
        program, *words = command.split()
        if words[:2] == ["-m", "cupy_flash"]:
            assert package.main(words[2:]) == 0
            assert "sm_90a" in capsys.readouterr().out
        else:
            assert (ROOT / (words[0] if program.endswith("python") else program)).is_file()


def test_short_and_missing_texts_are_refused(train_file, tmp_path, monkeypatch, capsys):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for path, reason in ((short, "too short"), (tmp_path / "missing.txt", "there is no file")):
        monkeypatch.setattr(sys, "argv", ["demo", "--text", str(path)])
        with pytest.raises(SystemExit):
            train_file.main()
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("paged", [False, True])
def test_greedy_text_is_the_same_with_a_kv_cache(model_file, paged):
    """Every character that attention over a cache leads to is the one that attention over everything does."""
    sizes = model_file.Sizes(vocabulary=61, context=64, layers=2, heads=2, width=32)
    model = model_file.Transformer(np, sizes, seed=5)
    prompt = np.random.default_rng(0).integers(0, sizes.vocabulary, (3, 9))
    features, room, page = sizes.width // sizes.heads, sizes.context, 16
    shape = (3 * room // page, page) if paged else (3, room)
    table = np.random.default_rng(1).permutation(shape[0]).reshape(3, -1).astype(np.int32) if paged else None
    caches = [np.zeros((2, *shape, sizes.heads, features), np.float32) for _ in range(sizes.layers)]
    past = 0

    def attend(x, layer, batch, _cache=None):
        """`Transformer.attend`, with the keys of all earlier calls in a cache and rotation by the library."""
        x, _ = model_file.normal(x)
        qkv, _ = model._linear(x, f"qkv{layer}")
        q, k, v = qkv.reshape(batch, -1, 3, sizes.heads, features).swapaxes(0, 2).swapaxes(1, 2)
        o = attention_with_kv_cache(
            model_file.normal(q)[0], *caches[layer], cache_seqlens=past, block_table=table,
            k=model_file.normal(k)[0], v=v, rotary=Rotary(model.cosine[:, 0], model.sine[:, 0]),
            causal=True, layout="bshd",
        )  # fmt: skip
        return model._linear(o.reshape(x.shape), f"mix{layer}")

    cached = model_file.Transformer(np, sizes, seed=5)
    cached.attend = attend
    text, unseen = prompt, prompt
    for _ in range(40):
        everything = model.logits(text)[0].reshape(3, -1, sizes.vocabulary)[:, -1]
        step = cached.logits(unseen)[0].reshape(3, -1, sizes.vocabulary)[:, -1]
        past += unseen.shape[1] - 1
        np.testing.assert_allclose(step, everything, atol=1e-4)
        assert (step.argmax(axis=-1) == everything.argmax(axis=-1)).all()
        text = np.concatenate([text, step.argmax(axis=-1)[:, None]], axis=1)
        unseen = text[:, -2:]
