"""What is said without running anything: explain, memory_report, info, the command line; configurations."""

import json
from itertools import product

import numpy as np
import pytest

import cupy_flash
from cupy_flash import AttentionConfig, FlashAttention, InvalidArgumentsError, UnsupportedError, info
from cupy_flash.__main__ import main
from cupy_flash.call.masks import Band
from cupy_flash.call.options import DenseOptions, declared
from cupy_flash.plan import catalog


def arrays(batch=1, heads=4, seqlen=48, head_dim=32, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((batch, heads, seqlen, head_dim)).astype(dtype) for _ in range(3)]


# An example of every option of attention, with whatever it needs besides.
OPTIONS = {
    "causal": {"causal": True}, "window": {"window": (3, 0)}, "align": {"align": "top_left"},
    "mask": {"mask": np.ones((8, 8), bool)}, "bias": {"bias": np.zeros((8, 8), np.float32)},
    "scale": {"scale": 0.5}, "softcap": {"softcap": 2.0},
    "alibi_slopes": {"alibi_slopes": np.ones(4, np.float32)}, "sinks": {"sinks": np.ones(4, np.float32)},
    "dropout": {"dropout": 0.5, "seed": 1}, "seed": {"seed": 1},
    "score": {"score": cupy_flash.score(lambda s, b, h, i, j: s + 1)},
    "layout": {"layout": "bshd"}, "precision": {"precision": "tf32"},
    "reproducible": {"reproducible": "batch"},
    "tuning": {"tuning": cupy_flash.Tuning(tile=(32, 32))},
}  # fmt: skip


class TestExplain:
    @pytest.mark.parametrize("arch", [row.name for row in catalog.ARCHITECTURES])
    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_prints_a_plan_for_every_architecture_without_a_gpu(self, arch, direction):
        q, k, v = arrays(dtype=np.float16)
        text = cupy_flash.explain(q, k, v, causal=True, arch=arch, direction=direction)
        assert f" on {arch}" in text
        assert f"_{direction}" in text.split("kernel", 1)[1]
        for word in ("tile", "grid", "shared memory", "cubin"):
            assert word in text

    def test_says_why_a_preferred_family_was_passed_by(self):
        q, k, v = arrays(head_dim=300, dtype=np.float32)
        assert "skipped   flash: head_dim 300 is above 256" in cupy_flash.explain(q, k, v, arch="sm_80")

    @pytest.mark.parametrize("name", declared(DenseOptions))
    def test_takes_every_option_of_attention(self, name):
        """By the declaration: what the call refuses is refused in the same words, all else has a plan."""
        q, k, v = arrays(seqlen=8)
        given = OPTIONS[name]
        calls = (lambda: cupy_flash.attention(q, k, v, **given), lambda: cupy_flash.explain(q, k, v, **given))
        if name == "precision":
            said = []
            for call in calls:
                with pytest.raises(UnsupportedError) as caught:
                    call()
                said.append(str(caught.value))
            assert said[0] == said[1]
        else:
            calls[0]()
            assert calls[1]().startswith("problem   forward")

    @pytest.mark.parametrize(
        ("name", "arch"),
        [("H100", "sm_90"), ("NVIDIA H200", "sm_90"), ("RTX 4090", "sm_89"), ("GeForce RTX 3080Ti", "sm_86"),
         ("gb10", "sm_121"), ("sm90", "sm_90"), ("8.6", "sm_86"), ("compute_75", "sm_75")],
    )  # fmt: skip
    def test_offers_the_architecture_of_a_gpu_by_its_name(self, name, arch):
        with pytest.raises(UnsupportedError, match=f'(?s)no kernel is compiled for .*\\nTry: arch="{arch}"$'):
            cupy_flash.explain(*arrays(), arch=name)

    @pytest.mark.parametrize("name", ["sm52", "5.0", "K80", "sm_", ""])
    def test_offers_no_architecture_that_it_would_refuse(self, name):
        with pytest.raises(UnsupportedError, match="Try: python -m cupy_flash info"):
            cupy_flash.explain(*arrays(), arch=name)

    def test_names_the_tiles_of_the_cpu_path(self):
        text = cupy_flash.explain(*arrays(), tuning=cupy_flash.Tuning(tile=(16, 24)))
        assert "tiled NumPy: 16 queries x 24 keys" in text

    def test_refuses_what_attention_refuses(self):
        q, k, v = arrays()
        with pytest.raises(InvalidArgumentsError, match="direction"):
            cupy_flash.explain(q, k, v, direction="sideways")
        with pytest.raises(InvalidArgumentsError, match="head_dim"):
            cupy_flash.explain(q, k[..., :5], v)


class TestMemoryReport:
    @pytest.mark.parametrize("causal", [False, True])
    def test_counts_what_a_loop_counts(self, causal):
        report = cupy_flash.memory_report(2, 4, 33, 16, heads_k=2, head_dim_v=24, causal=causal)
        pairs = sum(1 for i in range(33) for j in range(33) if j <= i or not causal)
        assert report.flops == 2 * 4 * pairs * 2 * (16 + 24)
        assert report.naive_bytes == 2 * 4 * (2 * 4 * 33 * 33)
        assert report.flash_bytes == 4 * (2 * 4 * 33)
        assert report.operand_bytes == 4 * 33 * 2 * ((4 + 2) * 16 + (2 + 4) * 24)

    def test_backward_has_five_products_and_a_workspace(self):
        forward = cupy_flash.memory_report(1, 8, 1024, 64, arch="sm_80")
        backward = cupy_flash.memory_report(1, 8, 1024, 64, arch="sm_80", backward=True)
        assert backward.flops == 2.5 * forward.flops
        narrow = cupy_flash.memory_report(1, 8, 1024, 64, head_dim_v=32, backward=True)
        assert narrow.flops == 2 * 8 * 1024**2 * (3 * 64 + 2 * 32)
        assert backward.plan.workspace_bytes > 0
        assert backward.flash_bytes == forward.flash_bytes + backward.plan.workspace_bytes
        assert "sm_80" in str(backward)

    def test_flash_memory_is_linear_and_naive_memory_is_not(self):
        short, long = (cupy_flash.memory_report(1, 1, s, 64, backward=True) for s in (1024, 16384))
        assert long.flash_bytes == 16 * short.flash_bytes
        assert long.naive_bytes == 256 * short.naive_bytes

    @pytest.mark.parametrize(
        ("module", "spelled"),
        [("numpy", "float16"), ("numpy", "float32"), ("numpy", "float64"), ("torch", "float16"),
         ("torch", "bfloat16"), ("torch", "float64"), ("jax.numpy", "float16"), ("jax.numpy", "bfloat16"),
         ("ml_dtypes", "bfloat16")],
    )  # fmt: skip
    def test_dtypes_of_every_library(self, module, spelled):
        library = pytest.importorskip(module, reason=f"{module} is not installed")
        report = cupy_flash.memory_report(1, 4, 9, 8, dtype=getattr(library, spelled))
        assert report == cupy_flash.memory_report(1, 4, 9, 8, dtype=spelled)
        if module != "torch":
            assert report == cupy_flash.memory_report(1, 4, 9, 8, dtype=np.dtype(getattr(library, spelled)))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"batch": 0}, "batch is 0"), ({"dtype": "int8"}, "dtype"), ({"dtype": None}, "dtype is None"),
         ({"dtype": np.int32}, "dtype is .*int32"), ({"dtype": 3}, "dtype is 3"),
         ({"heads_k": 3}, r"multiple of heads_k = 3\.\nTry: heads_k=1, or another divisor of 4$"),
         ({"seqlen_k": 5, "causal": True}, "ambiguous")],
    )  # fmt: skip
    def test_bad_sizes_are_refused(self, changes, message):
        sizes = {"batch": 1, "heads": 4, "seqlen": 9, "head_dim": 8}
        with pytest.raises(InvalidArgumentsError, match=message):
            cupy_flash.memory_report(**{**sizes, **changes})


class TestNaive:
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    @pytest.mark.parametrize("rank", [2, 3, 4])
    def test_agrees_with_attention_and_tells_its_bytes(self, layout, rank):
        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal((2, 6, 5, 8)[4 - rank :]) for _ in range(3))
        options = {"causal": True, "align": 1, "softcap": 3.0, "layout": layout, "window": (3, None)}
        naive = cupy_flash.naive_attention(q, k, v, **options)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_allclose(naive.o, o, atol=1e-13)
        np.testing.assert_allclose(naive.lse, lse, atol=1e-13)
        heads, rows = (1, q.shape[0]) if rank == 2 else lse.shape[-2:]
        assert naive.scores_bytes == 2 * 8 * (2 if rank == 4 else 1) * heads * rows * rows

    def test_every_score_feature(self):
        q, k, v = arrays(dtype=np.float64)
        rng = np.random.default_rng(2)
        options = {
            "mask": rng.random((48, 48)) < 0.6, "bias": rng.standard_normal((4, 1, 48)),
            "alibi_slopes": rng.random(4), "sinks": rng.standard_normal(4),
        }  # fmt: skip
        naive = cupy_flash.naive_attention(q, k, v, **options)
        o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_allclose(naive.o, o, atol=1e-13)
        np.testing.assert_allclose(naive.lse, lse, atol=1e-13)


class TestConfig:
    def test_values_and_their_changes(self):
        config = cupy_flash.default_config(64)
        assert (config.causal, config.dropout, config.softmax_scale) == (False, 0.0, 0.125)
        assert cupy_flash.causal_config(64) == config.with_causal()
        assert config.with_dropout(0.1).dropout == 0.1
        assert AttentionConfig(64, scale=2).softmax_scale == 2.0
        of_each_head = np.array([0.5, 0.25])
        assert AttentionConfig(64, scale=of_each_head).softmax_scale is of_each_head
        assert AttentionConfig(64, scale=of_each_head).options()["scale"] is of_each_head
        assert hash(config) == hash(cupy_flash.default_config(64))

    def test_callable_is_attention_with_its_options(self):
        q, k, v = arrays()
        flash = FlashAttention(AttentionConfig(32, causal=True, window=(7, None), softcap=5.0))
        options = {"causal": True, "window": (7, None), "softcap": 5.0}
        o, lse = flash(q, k, v, return_lse=True)
        np.testing.assert_array_equal(o, cupy_flash.attention(q, k, v, **options))
        ours = flash.backward(o, q, k, v, o, lse)
        theirs = cupy_flash.attention_backward(o, q, k, v, o, lse, **options)
        for a, b in zip(ours[:3], theirs[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        assert "softcap=5.0" in repr(flash)

    def test_what_it_holds_cannot_be_given_again(self):
        q, k, v = arrays()
        flash = FlashAttention(cupy_flash.causal_config(32))
        with pytest.raises(InvalidArgumentsError, match="causal is held by the configuration"):
            flash(q, k, v, causal=False)
        with pytest.raises(InvalidArgumentsError, match="head_dim 32, the configuration 64"):
            FlashAttention(cupy_flash.default_config(64))(q, k, v)
        with pytest.raises(InvalidArgumentsError, match="not an AttentionConfig"):
            FlashAttention("causal")


class TestCommandLine:
    def test_explain_prints_four_architectures(self, capsys):
        assert main(["explain", "--head-dim", "64", "--causal"]) == 0
        text = capsys.readouterr().out
        for arch in ("sm_75", "sm_80", "sm_90", "sm_120"):
            assert f" on {arch}\n" in text

    def test_memory(self, capsys):
        assert main(["memory", "--seqlen", "16384", "--backward", "--arch", "sm_90a"]) == 0
        assert "16 GiB for the S x S matrices" in capsys.readouterr().out

    def test_info_tells_what_is_here_and_what_is_missing(self, capsys, monkeypatch):
        def no_gpu():
            raise UnsupportedError("there is no NVIDIA driver on this machine.", hint="nvidia-smi")

        monkeypatch.setattr(info.driver, "devices", no_gpu)
        monkeypatch.setattr(info.choice, "gpu_driver", lambda _library: info.driver)
        assert main(["info"]) == 0
        text = capsys.readouterr().out
        assert f"cupy_flash {cupy_flash.__version__}" in text
        assert "there is no NVIDIA driver" in text
        assert "Try: nvidia-smi" in text
        assert "tiled NumPy" in text
        assert main(["info", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["gpus"] == []
        assert any("no NVIDIA driver" in problem for problem in found["problems"])

    def test_errors_go_to_stderr_with_exit_code_1(self, capsys):
        assert main(["explain", "--arch", "sm_52"]) == 1
        assert "UnsupportedError: no kernel is compiled for 'sm_52'" in capsys.readouterr().err
        with pytest.raises(SystemExit) as stop:
            main(["explode"])
        assert stop.value.code == 2


def test_pairs_are_counted_without_a_loop() -> None:
    bounds = (None, 0, 1, 3, 9)
    for offset, left, right, queries, keys in product((-9, -1, 0, 4), bounds, bounds, (1, 5, 8), (1, 5, 8)):
        band = Band(offset, left, right)
        one_by_one = (band.keys(query, query, keys) for query in range(queries))
        assert band.pairs(queries, keys) == sum(stop - first for first, stop in one_by_one)
    report = cupy_flash.memory_report(1, 1, 2**36, 64, causal=True)
    assert report.flops == 2 * 64 * 2**36 * (2**36 + 1)
