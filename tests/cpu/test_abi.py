"""abi.py against abi.cuh: offsets and sizes as g++ computes them, and the packing as NumPy reads it."""

import ctypes
import re
import shutil
import subprocess
from struct import calcsize

import numpy as np
import pytest

from cupy_flash.call.adopt import adopt
from cupy_flash.call.describe import describe
from cupy_flash.call.given import Options
from cupy_flash.device import abi
from cupy_flash.plan import families
from cupy_flash.plan.launch import Launch
from tests.paths import KERNELS_CU

# Structs of calls with the names of the tensor maps before them.
MAPS = {
    "HopperDecodeParams": ("DecodeParams", "k_map"),
    "HopperForwardParams": ("ForwardParams", "q_map", "k_map", "v_map", "o_map"),
    "HopperFp8ForwardParams": ("Fp8ForwardParams", "q_map", "k_map", "v_map", "o_map"),
    "HopperBackwardParams": ("BackwardParams", "q_map", "k_map", "v_map", "do_map"),
}


def layout_of(struct):
    """The layout of a struct that kernels take: tensor maps, the params of a call, and further fields."""
    name, *maps = MAPS.get(struct, (struct,))
    (call, *further), _ = abi._STRUCTS_OF_CALLS[name]
    if not maps and not further:
        return call
    fields = [*((name, "V128") for name in maps), ("call", call)]
    for dtype in further:
        fields += [(name, dtype[name]) for name in dtype.names]
    packed = np.dtype(fields)
    return np.dtype(
        {
            "names": packed.names,
            "formats": [packed[name] for name in packed.names],
            "offsets": [packed.fields[name][1] for name in packed.names],
            "itemsize": -(-packed.itemsize // 64) * 64 if maps else packed.itemsize,
        }
    )


STRUCTS = {
    "Tensor": abi.TENSOR,
    "Rows": abi.ROWS,
    "Shape": abi.SHAPE,
    "Score": abi.SCORE,
    "ArgumentGradient": abi.ARGUMENT_GRADIENT,
    "Units": abi.UNITS,
    "Cache": abi.CACHE,
    "Rotary": abi.ROTARY,
    "Scales": abi.SCALES,
    **{struct: layout_of(struct) for struct in (*abi._STRUCTS_OF_CALLS, *MAPS)},
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """{(struct, field): (offset, size)} and {struct: size} from the C++ side."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine to compile abi.cuh with")
    lines = []
    for struct, dtype in STRUCTS.items():
        lines.append(f'printf("{struct} . 0 %zu\\n", sizeof({struct}));')
        for field in dtype.names:
            lines.append(
                f'printf("{struct} {field} %zu %zu\\n", offsetof({struct}, {field}), '
                f"sizeof((({struct}*)nullptr)->{field}));"
            )
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "offsets.cpp"
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "abi.cuh"\nint main() {\n'
        + "\n".join(lines)
        + "\n}\n"
    )
    program = folder / "offsets"
    include = KERNELS_CU / "include"
    subprocess.run(["g++", "-std=c++20", f"-I{include}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in output.splitlines()]
    return {(struct, field): (int(offset), int(size)) for struct, field, offset, size in rows}


@pytest.mark.parametrize("struct", STRUCTS)
def test_offsets_are_those_of_the_compiler(compiled, struct):
    dtype = STRUCTS[struct]
    assert compiled[struct, "."][1] == dtype.itemsize
    for field in dtype.names:
        kind, offset = dtype.fields[field][:2]
        assert compiled[struct, field] == (offset, kind.itemsize), field


@pytest.mark.parametrize("struct", STRUCTS)
def test_no_field_of_the_header_is_missing(struct):
    text = (KERNELS_CU / "include" / "abi.cuh").read_text()
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.S).group(1)
    body = re.sub(r"#if.*?#endif|//.*?$", "", body, flags=re.S | re.M)
    declared = [
        re.sub(r"\[\d+\]$", "", name.strip(" *"))
        for line in body.split(";")
        if line.strip()
        for name in re.sub(r"^\s*(const )?\w+[ *]+", "", line.strip()).split(",")
    ]
    assert declared == list(STRUCTS[struct].names)


def test_arrays_of_a_score_function_stand_behind_the_score(tmp_path):
    source, program = tmp_path / "sizes.cpp", tmp_path / "sizes"
    named = [
        "sizeof(FunctionArray)", "offsetof(Score, arrays)", "sizeof(Score)", "sizeof(ForwardParams)",
        "offsetof(ForwardParams, next_tile)", "sizeof(BackwardParams)",
    ]  # fmt: skip
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "abi.cuh"\nint main() {\n'
        + "".join(f'printf("%zu\\n", {name});\n' for name in named)
        + "}\n"
    )
    command = ["g++", "-std=c++20", "-DCF_FUNCTION=2", f"-I{KERNELS_CU / 'include'}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    own = 2 * abi.FUNCTION_ARRAY.itemsize
    forward, backward = (calcsize("<" + abi._codes(f"{x}Params", 2)) for x in ("Forward", "Backward"))
    assert [int(line) for line in said.split()] == [
        abi.FUNCTION_ARRAY.itemsize, abi.SCORE.itemsize, abi.SCORE.itemsize + own, forward,
        abi.FORWARD.fields["next_tile"][1] + own, backward,
    ]  # fmt: skip
    assert (forward, backward) == (abi.FORWARD.itemsize + own, abi.BACKWARD.itemsize + own)


LAUNCH = Launch(families.variants("sm_80")[0], (1, 1, 1), (1, 1, 1))


def packed(problem, views):
    numbers = {name: view.pointer for name, view in views.items()} | {abi.SEED: problem.seed}
    return np.frombuffer(abi.Params("ForwardParams", problem, views, LAUNCH).of(numbers), abi.FORWARD)[0]


def test_packing_puts_each_value_in_its_field():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 5, 8)).astype(np.float32)
    k = rng.standard_normal((2, 2, 7, 8)).astype(np.float32)
    v = rng.standard_normal((2, 7, 2, 16)).astype(np.float32).swapaxes(1, 2)
    bias = np.zeros((4, 1, 7), np.float16)
    slopes = np.ones((2, 4), np.float32)
    options = Options(causal=True, window=(3, 9), align=1, softcap=2.5, dropout=0.25, seed=2**63 + 5)
    problem, views, _ = describe(
        "forward", {"q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": slopes}, options
    )
    o = np.empty((2, 4, 5, 16), np.float32)
    params = packed(problem, {**views, "o": adopt(o, "o")})
    assert params["q"].tolist() == (q.ctypes.data, 4 * 5 * 8, 5 * 8, 8, 1)
    assert params["v"].tolist() == (v.ctypes.data, 7 * 2 * 16, 16, 2 * 16, 1)
    assert params["lse"].tolist() == (0, 0, 0, 0)
    assert params["shape"].tolist() == (2, 4, 2, 5, 7, 8, 16, 0, 0, 0, 0)
    score = params["score"]
    assert score["bias"].tolist() == (bias.ctypes.data, 0, 7, 0, 1)
    assert (score["scale"], score["softcap"]) == (8**-0.5, 2.5)
    assert (score["offset"], score["left"], score["right"], score["offset_from_end"]) == (1, 3, 0, 0)
    assert (score["alibi_slopes"], score["alibi_batch"]) == (slopes.ctypes.data, 4)
    assert score["alibi_head"] == 1
    assert (score["sinks"], score["sinks_head"], score["bias_type"]) == (0, 0, 0)
    assert (score["dropout_seed"], score["dropout_threshold"]) == (2**63 + 5, 2**30)
    assert score["dropout_scale"] == pytest.approx(4 / 3)


def test_a_stride_beyond_32_bits_survives_packing():
    """A view whose rows lie more than 2**31 elements apart is described without touching its memory."""
    base = np.zeros(1, np.float16)
    far = np.lib.stride_tricks.as_strided(base, (1, 2, 3, 8), (0, 2**36, 2**33, 2))
    near = np.zeros((1, 2, 3, 8), np.float16)
    problem, views, _ = describe("forward", {"q": far, "k": near, "v": near}, Options())
    params = packed(problem, views)
    assert params["q"].tolist() == (base.ctypes.data, 0, 2**35, 2**32, 1)


def lying(shape=(1, 2, 3, 8), strides=(96, 48, 16, 2), start=0):
    """An array of float16 that lies this many bytes behind a boundary of 16; nobody reads it."""
    room = np.zeros(32, np.float16)
    first = -room.ctypes.data % 16 + start
    return np.lib.stride_tricks.as_strided(room[first // 2 :], shape, strides)


# How an array lies: (in_rows, boxes, aligned), for copies of 16 bytes and for tensor maps.
LYING = {
    "contiguous": (lying(), (True, True, True)),
    "one sequence of no stride": (lying(strides=(0, 48, 16, 2)), (True, True, True)),
    "one feature of a stride": (lying((1, 2, 3, 1), (96, 48, 16, 6)), (True, True, False)),
    "late": (lying(start=2), (True, True, False)),
    "late by half": (lying(start=8), (True, True, False)),
    "rows of nine": (lying(strides=(96, 48, 18, 2)), (True, True, False)),
    "heads of odd rows": (lying(strides=(96, 50, 16, 2)), (True, True, False)),
    "odd sequences": (lying((2, 2, 3, 8), (98, 48, 16, 2)), (True, True, False)),
    "one odd sequence": (lying(strides=(98, 48, 16, 2)), (True, True, True)),
    "rows backwards": (lying(strides=(96, 48, -16, 2)), (True, False, False)),
    "heads backwards": (lying(strides=(96, -48, 16, 2)), (True, False, True)),
    "one head for all": (lying(strides=(96, 0, 16, 2)), (True, False, True)),
    "one row for all": (lying(strides=(96, 48, 0, 2)), (True, False, True)),
    "every other feature": (lying(strides=(96, 48, 32, 4)), (False, True, False)),
    "features backwards": (lying(strides=(96, 48, 16, -2)), (False, False, False)),
    "the furthest rows": (lying(strides=(96, 48, 2**31 - 16, 2)), (True, True, True)),
    "rows too far apart": (lying(strides=(96, 48, 2**31, 2)), (False, True, False)),
    "the furthest rows backwards": (lying(strides=(96, 48, -(2**31), 2)), (True, False, False)),
    "rows too far backwards": (lying(strides=(96, 48, -(2**31) - 16, 2)), (False, False, False)),
    "single rows too far apart": (lying((1, 2, 1, 8), (96, 2**31, 16, 2)), (False, True, False)),
    "a single row of far strides": (lying((1, 2, 1, 8), (96, 48, 2**31, 2)), (False, True, False)),
    "the furthest heads": (lying(strides=(96, 2**40 - 16, 16, 2)), (True, True, True)),
    "heads too far apart": (lying(strides=(96, 2**40, 16, 2)), (True, False, True)),
    "far heads of many rows": (lying(strides=(96, 2**31, 16, 2)), (True, True, True)),
}


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_how_arrays_lie(which, name):
    x, wanted = LYING[name]
    given = dict.fromkeys("qkv", np.zeros(x.shape, np.float16)) | {which: x}
    problem, *_ = describe("forward", given, Options())
    assert (problem.in_rows, problem.boxes, problem.aligned) == wanted


def test_rows_of_results_lie_on_boundaries():
    """Results are contiguous: 12 halves are 24 bytes, even where those given are 12 of 16."""
    wide, narrow = lying((1, 2, 3, 8)), lying((1, 2, 3, 12), (192, 96, 32, 2))

    def aligned(direction, **given):
        if direction == "backward":
            given |= {"o": given["v"], "do": given["v"], "lse": np.zeros((1, 2, 3), np.float32)}
        return describe(direction, given, Options())[0].aligned

    assert not aligned("forward", q=wide, k=wide, v=narrow), "o"
    assert aligned("forward", q=narrow, k=narrow, v=wide), "o, not dq"
    assert not aligned("backward", q=narrow, k=narrow, v=wide), "dq"
    assert not aligned("backward", q=wide, k=wide, v=narrow), "dv"
    assert aligned("backward", q=wide, k=wide, v=wide)


def test_params_fit_the_launch_limit():
    assert ctypes.sizeof(ctypes.c_char * abi.BACKWARD.itemsize) <= 4096
