"""Every model of transformers: it must not see the future, and give what eager attention gives."""

import os
from collections import Counter
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'cupy-flash[transformers]'"
)

import cupy_flash.transformers as cf
from cupy_flash import UnsupportedError
from tests.conftest import drawn
from tests.transformers import tiny

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]  # those of the models

RIGHT, SEES_ALL = "right", "right, and sees all tokens"
REFUSED, NOT_ASKED = "refused", "does not ask for attention"
NOT_BUILT, NO_TOKENS = "not built, or not run", "takes no tokens"


@pytest.fixture
def asked(monkeypatch):
    """Which layers asked for our attention."""
    cf.register()
    layers = []

    def attend(module, *args, **options):
        layers.append(type(module).__name__)
        return cf.attention_forward(module, *args, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, cf.NAME, attend)
    return layers


def compared(kind, asked):
    """What becomes of a type of model, and why; AssertionError if it sees the future or is not eager's."""
    found, reasons = NO_TOKENS, []
    for model in tiny.tiny_models(kind, reasons):
        for way, call in tiny.ways_to_call(model):
            found = NOT_BUILT if found == NO_TOKENS else found
            where = f"{type(model).__name__}, {way}"
            tiny.use(model, "eager")
            try:
                wanted, again = tiny.run(call), tiny.run(call)
            except Exception as error:  # it wants images, sounds or names that are not known here
                reasons.append(f"{where}: {type(error).__name__}: {error}")
                continue
            if not all(map(torch.equal, wanted, again)):
                reasons.append(f"{where}: eager attention does not repeat its numbers")
                continue
            asked.clear()
            tiny.use(model, cf.NAME)
            try:
                ours = tiny.run(call)
            except UnsupportedError as error:
                return REFUSED, f"{where}: {' '.join(str(error).split())}"
            except ValueError as error:  # models that compute attention themselves look at its shape first
                if not str(error).startswith("Attention mask should be of size"):
                    raise
                return REFUSED, f"{where} itself: {error}"
            for name, a, b in zip(("plain", "changed", "padded"), ours, wanted, strict=True):
                run = f"{kind}: {where}, {name}"
                torch.testing.assert_close(
                    a, b, rtol=1e-3, atol=1e-4 * max(1, b.abs().max()),
                    msg=lambda text, run=run: f"{run}, is not eager's: {text}",
                )  # fmt: skip
            before, after = (x[:, : tiny.PREFIX] for x in wanted[:2])
            is_decoder = torch.allclose(before, after, rtol=1e-5, atol=1e-5)
            if is_decoder:
                late, early = (x[:, : tiny.PREFIX] for x in ours[:2])
                assert torch.allclose(late, early, rtol=1e-5, atol=1e-5), f"{kind}: {where} sees the future"
            if asked and is_decoder:
                return RIGHT, where
            found = SEES_ALL if asked else NOT_ASKED if found == NOT_BUILT else found
            reasons.append(f"{where}: {SEES_ALL if asked else NOT_ASKED}")
    if reasons and found == NO_TOKENS:
        found = NOT_BUILT
    return found, "; ".join(" ".join(x.split())[:160] for x in reasons)


# Those whose layers say that they are not causal, and some of each family.
SAMPLE = {
    **dict.fromkeys(("nllb-moe", "pegasus_x", "clip_text_model", "time_series_transformer"), RIGHT),
    **dict.fromkeys(("gpt2", "gemma3_text", "t5", "whisper", "bert", "deepseek_v32"), RIGHT),
    **dict.fromkeys(("distilbert", "eurobert"), SEES_ALL),
    **dict.fromkeys(("git", "bigbird_pegasus", "blip", "bloom", "led", "longformer"), REFUSED),
}


@pytest.mark.parametrize("kind", SAMPLE)
def test_some_decoders(kind, asked):
    what, why = compared(kind, asked)
    assert what == SAMPLE[kind], why


@pytest.mark.slow
@pytest.mark.parametrize("are_decoders", [True, False], ids=["decoders", "others"])
def test_every_type_of_model(are_decoders, asked, request):
    """On a push one of two: the rest show the same calls of ours a second time."""
    results, wrong = {}, {}
    decoders, others = tiny.kinds_of_models()
    option = request.config.option
    for kind in decoders if are_decoders else others:
        if option.in_turn and not drawn(kind, 2, option.sample):
            continue
        try:
            results[kind] = compared(kind, asked)
        except Exception as error:  # all of them are told, not the first
            wrong[kind] = f"{type(error).__name__}: {error}"
    for kind, (what, why) in sorted(results.items(), key=lambda x: (x[1][0], x[0])):
        if what not in (RIGHT, SEES_ALL, NO_TOKENS):
            print(f"{what}: {kind}: {why}")
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    refused = {kind.removesuffix("_text") for kind, (what, _) in results.items() if what == REFUSED}
    counts = Counter(what for what, _ in results.values())
    print(f"of {len(results)} types of model: {dict(counts)}")
    assert not wrong
    assert not [kind for kind in refused if f"`{kind}`" not in page], "not in docs/transformers.md"
    if are_decoders:
        assert counts[RIGHT] > counts[NOT_BUILT], "too few are tested to say anything"
